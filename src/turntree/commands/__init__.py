"""What the command line does with its arguments. Heavy imports happen inside the functions."""

from turntree.commands.compare import run_compare
from turntree.commands.console import Stopped, resumable
from turntree.commands.look import run_audit, run_check_env, run_doctor, run_explain, run_view
from turntree.commands.make import run_model, run_world
from turntree.commands.plan import run_plan
from turntree.commands.report import run_report
from turntree.commands.rltr import run_rltr
from turntree.commands.runs import run_coldstart, run_evaluate, run_quickstart, run_sft, run_train
from turntree.commands.search import run_index_build, run_index_info, run_index_search
from turntree.commands.serve import run_serve

__all__ = [
    "Stopped",
    "resumable",
    "run_audit",
    "run_check_env",
    "run_coldstart",
    "run_compare",
    "run_doctor",
    "run_evaluate",
    "run_explain",
    "run_index_build",
    "run_index_info",
    "run_index_search",
    "run_model",
    "run_plan",
    "run_quickstart",
    "run_report",
    "run_rltr",
    "run_serve",
    "run_sft",
    "run_train",
    "run_view",
    "run_world",
]
