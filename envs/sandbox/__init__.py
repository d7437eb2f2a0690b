"""Code of models in processes of their own, behind walls: namespaces, a filter of system calls, limits.

``probe()`` says what this machine can do, :class:`PythonTool` is the tool, :class:`SandboxOptions` its limits.
"""

from turntree.envs.sandbox.options import SandboxOptions
from turntree.envs.sandbox.tool import PythonTool
from turntree.envs.sandbox.walls import Probe, choose_walls, probe

__all__ = ["Probe", "PythonTool", "SandboxOptions", "choose_walls", "probe"]
