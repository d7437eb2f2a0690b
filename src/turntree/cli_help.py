"""How the command line explains itself."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["Configured", "Listed"]


class Listed(click.Group):
    """A group whose help says the whole first sentence of each command."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, command) for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=400)) for name, command in found])


class Configured(click.Command):
    """A command whose arguments are ``key=value`` overrides; its help lists every option with its default."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from turntree.trainers.compose import config_groups
        from turntree.trainers.config import documented_options

        with formatter.section("Config groups (GROUP=CHOICE)"):
            formatter.write_dl([(group, ", ".join(choices)) for group, choices in config_groups().items()])
        with formatter.section("Options (KEY=VALUE), with the defaults of the schema"):
            formatter.write_dl([(f"{key}={_shown(default)}", doc) for key, default, doc in documented_options()])


def _shown(default: Any) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) if default != "" else "''"
