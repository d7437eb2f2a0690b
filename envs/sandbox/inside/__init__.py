"""What runs on the other side: in the process that makes sandboxes, and inside of them.

Only the standard library is imported here, and nothing of turntree outside of this folder: these modules are started
by path in a Python without site packages.
"""
