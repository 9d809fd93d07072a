"""The command line: `portattn backends`, `portattn conformance`, `portattn bench`, ...

The rule kept here: a command prints for people by default and the same facts as JSON on demand,
and its exit status says the answer. Commands are imported when they are called.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import click

import portattn

# command -> (module, attribute, one line of help, so that `--help` imports none of them)
_LAZY = {
    "conformance": ("portattn.conformance.cli", "cli", "Prove what a backend or any kernel does."),
    "bench": ("portattn.bench.cli", "cli", "Time backends against peers, interleaved."),
    "tune": ("portattn.tune_command", "cli", "Measure a backend's tiles on the device at hand."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_LAZY})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in _LAZY:
            module, attribute, _ = _LAZY[name]
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        return super().get_command(ctx, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(n, c.get_short_help_str(80)) for n, c in self.commands.items()]
        rows += [(name, text) for name, (_, _, text) in _LAZY.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(portattn.__version__, prog_name="portattn")
def cli() -> None:
    """Exact attention on four backends, and proof of what each one does on this machine."""


def _window(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """``LEFT,RIGHT``; an empty side is unlimited."""
    if value is None:
        return None
    sides = value.split(",")
    try:
        if len(sides) != 2:
            raise ValueError
        return tuple(int(s) if s.strip() else None for s in sides)
    except ValueError:
        raise click.BadParameter(f"got {value!r}; want LEFT,RIGHT, such as 128,0 or 128,") from None


@cli.command()
@click.option("--head-dim", type=int, help="Ask for a problem of this head dim.")
@click.option("--dtype", help="float16, bfloat16, float32 or float64.")
@click.option("--seq", type=int, help="Tokens of queries and keys.")
@click.option("--seq-q", type=int, help="Tokens of queries alone.")
@click.option("--seq-k", type=int, help="Tokens of keys alone.")
@click.option("--batch", type=int, help="Sequences.")
@click.option("--heads-q", type=int, help="Query heads.")
@click.option("--heads-k", type=int, help="Key heads (GQA, MQA).")
@click.option("--head-dim-v", type=int, help="Head dim of the values.")
@click.option("--layout", help="bshd, bhsd or thd (packed).")
@click.option(
    "--causal",
    is_flag=False,
    flag_value="true",
    help="Causal; with unequal lengths bottom_right or top_left.",
)
@click.option("--window", callback=_window, help="LEFT,RIGHT keys; an empty side is unlimited.")
@click.option("--softcap", type=float, help="Cap c of c*tanh(scores/c).")
@click.option("--bias", is_flag=True, help="A dense float bias.")
@click.option("--mask", is_flag=True, help="A dense bool mask.")
@click.option("--alibi", is_flag=True, help="ALiBi slopes.")
@click.option("--sinks", is_flag=True, help="Attention sinks.")
@click.option("--seqused-k", is_flag=True, help="Used key lengths per sequence.")
@click.option("--block-size", type=int, help="Paged keys and values of this block size.")
@click.option("--precision", help="ieee or tf32.")
@click.option("--backward", is_flag=True, help="With the backward pass.")
@click.option("--device", help="cpu, cuda, or an architecture that is not here, such as sm_89.")
@click.option("--shared-memory", type=int, help="Plan for this many bytes per thread block.")
@click.option("--backend", help="Ask this backend only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def backends(ctx: click.Context, /, as_json: bool, **asked: Any) -> None:
    """Which backends this machine supports, and why not the others.

    Without options: every backend, ready or not, with every reason against it. With a problem
    (--head-dim and others): who accepts it, the tile plan, or every reason and the nearest problem
    that is supported. Exit status 0: some backend is ready (accepts); 3: none.
    """
    from portattn import report

    options = {n: x for n, x in asked.items() if x is not None and x is not False}
    seq = options.pop("seq", None)
    if seq is not None:
        options.setdefault("seq_q", seq)
        options.setdefault("seq_k", seq)
    if "causal" in options:
        options["causal"] = {"true": True, "false": False}.get(
            options["causal"].lower(), options["causal"]
        )
    if not options:
        infos = portattn.list_backends()
        if as_json:
            click.echo(json.dumps([i.to_json() for i in infos], indent=2))
        else:
            report.print_backends(infos)
        ctx.exit(0 if any(i.ready for i in infos) else 3)
    if "head_dim" not in options:
        raise click.UsageError("a problem needs --head-dim")
    try:
        decision = portattn.query(**options)
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps(decision.to_json(), indent=2))
    else:
        report.print_decision(decision)
    ctx.exit(0 if decision.chosen else 3)


def main() -> None:
    """The entry point of the console script."""
    # Help texts and tables hold characters that a legacy console encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    cli(prog_name="portattn")


if __name__ == "__main__":
    main()
