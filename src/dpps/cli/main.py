"""The program: the tree of commands, and the parsing of options. A command's module is imported when it is called."""

import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import chain
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from dpps.cli.help import Option, options_of, print_help
from dpps.errors import RunError, UsageError, unknown
from dpps.logs import only_from

DONE, FAILED, WRONG, STOPPED = 0, 1, 2, 3
"""Exit codes."""


@dataclass(frozen=True)
class Command:
    """A command: a function of the words behind its name, which gives the exit code."""

    help: str
    place: str
    """module:function, within this package."""
    options: str = ""
    """module:dataclass of its options; by default that of the module whose name begins as the function's does."""

    def kind(self) -> type[Any]:
        """The dataclass of its options."""
        module, _, function = self.place.partition(":")
        found: type[Any] = _found(self.options or f"{module}:{function.partition('_')[0].capitalize()}Config")
        return found


@dataclass(frozen=True)
class Group:
    """Commands behind one name."""

    help: str
    commands: Mapping[str, Command]
    about: str
    """What `--help` says after the list."""


COMMANDS: dict[str, Command | Group] = {
    "train": Command("train a model privately over many nodes", "train:train", "train:Options"),
    "resume": Command("continue a run that was stopped or crashed", "train:resume"),
    "stats": Command("ask questions about all nodes' records", "stats:stats"),
    "plan": Command("noise for an epsilon, epsilon for a noise", "plan:plan"),
    "tune": Command("search batch, epochs, clip and rate", "train:tune"),
    "predict": Command("predict new examples with a run's model", "models:predict"),
    "evaluate": Command("measure a run's models on labelled examples", "models:evaluate"),
    "report": Command("a page about a run, or a comparison of several", "models:report"),
    "data": Group(
        "draft a schema for your own tables or images",
        {"describe": Command("draft a schema from one file or folder", "data:describe")},
        "All nodes read their files by the same schema:\n"
        "dpps train --node-data DIR/node-{rank} --schema schema.toml",
    ),
    "topology": Command("facts and a picture of a graph", "plan:topology"),
    "federation": Group(
        "train between organisations: keys, contract, joining",
        {
            "key": Command("make a member's key and request", "federation:key"),
            "create": Command("sign the members' requests, write the contract", "federation:create"),
            "join": Command("take part in a run, and continue after a crash", "federation:join"),
            "status": Command("the round, who is here, what was spent", "federation:status"),
            "leave": Command("take no further part in a run", "federation:leave"),
            "expel": Command("write the next revision without a member", "federation:expel_member"),
            "renew": Command(
                "write the next revision with new certificates", "federation:renew_certificates"
            ),
            "show": Command("who is in a federation file, or who a member is", "federation:show"),
        },
        "dpps train --print-config writes a PLAN. Send new revisions to all members.",
    ),
    "audit": Command("attack the mechanism: a lower bound on its epsilon", "privacy:audit"),
    "attack": Command("what a curious neighbour reconstructs", "privacy:attack"),
    "ledger": Command("how much privacy a data set has spent, in all runs", "privacy:ledger"),
    "paper": Command("the paper's tables and figures, computed again", "paper:paper"),
    "completion": Command("print a completion script for bash or zsh", "main:completion"),
}

GONE = {
    "launch": "torchrun starts the processes: torchrun --nproc-per-node 4 -m dpps train --nodes 8 --out DIR",
    "member": "use dpps federation key (was: member init) or dpps federation show DIR (was: member show)",
    "join": "use dpps federation join",
    "status": "use dpps federation status",
    "leave": "use dpps federation leave",
    "secret": "use openssl rand -hex 32",
}
"""Commands of earlier versions, and what to use instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code: 0 done, 1 the run failed, 2 the request is wrong, 3 stopped on request.

    Args:
        arguments: without the program's name; by default those of this process.
    """
    code = DONE
    try:
        with log_lines():
            code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
    except (UsageError, RunError) as error:
        _complain(str(error).replace("[", r"\["))
        return WRONG if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt:  # where no run takes it as a request to stop after its round
        _complain("stopped on request")
        return STOPPED
    except BrokenPipeError:  # whoever we print to has seen enough (dpps ... | head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit as error:  # the parser has already said what is wrong
        return int(error.code or 0) if not isinstance(error.code, str) else WRONG
    return code


def _complain(words: str) -> None:
    plain_console(stderr=True).print(f"[bold red]dpps:[/] {words}")


def _dispatch(args: list[str]) -> int:
    name, *words = args or ["--help"]
    if name in ("-h", "--help"):
        _overview()
        return DONE
    if name in ("-V", "--version"):
        _versions()
        return DONE
    if name in GONE:
        raise UsageError(f"dpps {name} is gone: {GONE[name]}")
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    found = COMMANDS[name]
    if isinstance(found, Group):
        each, *words = words or ["--help"]
        if each in ("-h", "--help"):
            _explain(name, found)
            return DONE
        if each not in found.commands:
            raise unknown(f"command of dpps {name}", each, found.commands)
        found = found.commands[each]
    code: int = _found(found.place)(words)
    return code


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"dpps.cli.{module}"), name)


def commands() -> Iterator[tuple[tuple[str, ...], Command]]:
    """Every command in the tree, with its words."""
    for name, found in COMMANDS.items():
        if isinstance(found, Group):
            yield from (((name, each), command) for each, command in found.commands.items())
        else:
            yield (name,), found


def _overview() -> None:
    out = plain_console(soft_wrap=False)
    out.print("[bold]dpps[/]: learn together without a server and without trusting each other\n")
    out.print(_table("dpps", COMMANDS))
    out.print("\nStart here: [bold]dpps train[/] (ten nodes, embedded data, epsilon 3, under a minute).")
    out.print("COMMAND --help lists options. dpps --version prints what a bug report needs.")


def _explain(name: str, group: Group) -> None:
    out = plain_console(soft_wrap=False)
    out.print(f"dpps {name}: {group.help}\n")
    out.print(_table(f"dpps {name}", group.commands))
    out.print(
        f"\n{group.about}\ndpps {name} {next(iter(group.commands))} --help has the options of a command."
    )


def _table(before: str, listed: Mapping[str, Command | Group]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, command in listed.items():
        table.add_row(f"  [bold cyan]{before} {name}[/]", command.help)
    return table


def _versions() -> None:
    from importlib.metadata import PackageNotFoundError, version

    from dpps.version import versions

    found = versions()
    for name in ("grpcio", "matplotlib", "tensorboard"):  # of the extras
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    for name, value in (found | {"cores": str(os.cpu_count()), "OMP_NUM_THREADS": threads}).items():
        print(f"{name} {value}")


# From words to options

Options = TypeVar("Options")


def parse_options(
    kind: type[Options], arguments: Sequence[str], prog: str, default: Options | None = None
) -> Options:
    """The options in `arguments`. What the parser refuses is one line, like every other mistake.

    Args:
        kind: a dataclass with one field per option.
        arguments: as typed.
        prog: the command, for messages and --help.
        default: where options that are not given come from.
    """
    import tyro
    from tyro._errors import on_parse_error

    if "--help" in arguments or "-h" in arguments:
        print_help(kind, prog, plain_console(soft_wrap=False))
        raise SystemExit(DONE)
    _refuse_unknown(kind, arguments, prog)

    def refuse(event: Any) -> None:
        raise UsageError(f"{_one_line(event, arguments, prog)}; {prog} --help explains every option")

    more: dict[str, Any] = {} if default is None else {"default": default}
    with on_parse_error(refuse):
        found: Options = tyro.cli(kind, args=arguments, prog=prog, **more)
    return found


def _refuse_unknown(kind: type[Any], arguments: Sequence[str], prog: str) -> None:
    names = {field.name.replace("_", "-") for field in fields(kind)}
    unused = {name.replace("_", "-") for name in getattr(kind, "unused", ())}
    known = sorted(f"--{no}{name}" for name in names - unused for no in ("", "no-"))
    for word in arguments:
        flag = word.partition("=")[0].replace("_", "-")
        if not flag.startswith("--") or flag in known:
            continue
        if flag.removeprefix("--") in unused:
            raise UsageError(f"{prog} has no option {flag}, it would do nothing here: leave it out")
        near = get_close_matches(flag, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"{prog} has no option {flag}: {hint}{prog} --help lists them")


def _one_line(event: Any, arguments: Sequence[str], prog: str) -> str:
    """What is wrong: the option, what it was, what is allowed."""
    from tyro import _errors as kinds

    if isinstance(event, kinds.MissingArgs):
        missing = [each.arg.lowered for each in event.missing_arguments]
        named = ((each.name_or_flags[-1], each.metavar) for each in missing)
        return f"{prog} needs {' and '.join(f'{n} {m}' if n.startswith('--') else str(m) for n, m in named)}"
    if isinstance(event, kinds.UnrecognizedArgs):
        return f"unexpected {' '.join(event.tokens)}: a value belongs right behind its option"
    argument = getattr(event, "argument", None)
    flag = argument.lowered.name_or_flags[-1] if argument else prog
    if isinstance(event, kinds.InvalidChoice):
        return f"{flag} is {event.value!r}: choose one of {', '.join(map(repr, event.choices))}"
    if isinstance(event, kinds.BadValue):
        return f"{flag} needs a value"
    message = " ".join(str(getattr(event, "message", type(event).__name__)).split())
    for kind, what in (("float", "a number"), ("int", "a whole number")):
        if re.search(rf"\b{kind}\b", f"{argument and argument.lowered.metavar} {message}", re.IGNORECASE):
            return f"{flag} is {_value_of(flag, arguments)!r}: it must be {what}"
    return f"{flag}: {message}"


def _value_of(flag: str, arguments: Sequence[str]) -> str:
    """The word that an option was given, also as --option=word."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    spelled = [word.replace("_", "-") for word in words]
    return words[spelled.index(flag) + 1] if flag in spelled[:-1] else " ".join(arguments)


# How commands print: consoles, and log lines


def plain_console(**options: Any) -> Console:
    """A console that prints what it is given: long lines stay one line, numbers have no colours, and `:x:` in a name is no picture."""
    return Console(**{"highlight": False, "soft_wrap": True, "emoji": False} | options)


def wide_console() -> Console:
    """The same, for tables: in a file or a pipe nothing of them is folded."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=max(200, console.width))


def plain_table(texts: Sequence[str], numbers: Sequence[str] = (), **style: Any) -> Table:
    """A table with these columns, numbers to the right; without lines, unless a style is given."""
    table = Table(title_justify="left", **(style or {"box": None, "pad_edge": False}))
    for name in (*texts, *numbers):
        table.add_column(name, justify="left" if name in texts else "right", overflow="fold")
    return table


def facts_table() -> Table:
    """A table of names and values, without lines."""
    table = plain_table(("", ""), box=None, pad_edge=False, show_header=False)
    table.columns[0].style = "bold"
    return table


def working(console: Console, what: str) -> AbstractContextManager[object]:
    """A spinner for what takes a few seconds; nothing when the output is not a terminal."""
    return console.status(what) if console.is_terminal else nullcontext()


@contextmanager
def log_lines(formatter: logging.Formatter | None = None) -> Iterator[None]:
    """Within, warnings and errors of the library are lines on the standard error: the message alone, or as a formatter makes it.

    An inner formatter takes the place of an outer one. A caller's own logging stays as it was.
    """
    root, shown, name = logging.getLogger(), logging.StreamHandler(sys.stderr), "dpps.cli"
    shown.setFormatter(formatter or logging.Formatter("%(message)s"))
    shown.set_name(name)
    outer = [handler for handler in root.handlers if handler.name == name]
    root.handlers = [*(handler for handler in root.handlers if handler.name != name), shown]
    try:
        with only_from(logging.WARNING, root):
            yield
    finally:
        root.handlers = [*(handler for handler in root.handlers if handler is not shown), *outer]


@contextmanager
def stopped_by_signals(stop: Callable[[], None] | None = None) -> Iterator[None]:
    """Within, SIGTERM and Ctrl-C call a function, such as `stop` of a run. Without one both raise KeyboardInterrupt, also in the
    background of a shell, where Ctrl-C would not be noticed."""

    def noticed(number: int, frame: FrameType | None) -> None:
        if stop is None:
            raise KeyboardInterrupt
        stop()

    before = {number: signal.signal(number, noticed) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Scripts that complete commands, options and their values in a shell


@dataclass(frozen=True)
class CompletionConfig:
    """Print a script that completes commands, options and their values.

    Examples:
      source <(dpps completion bash)    in ~/.bashrc
      source <(dpps completion zsh)     in ~/.zshrc
    """

    shell: Positional[Annotated[Literal["bash", "zsh"], arg(metavar="{bash,zsh}")]]
    """The shell."""


def completion(arguments: list[str]) -> int:
    """Print a script."""
    config = parse_options(CompletionConfig, arguments, "dpps completion")
    print((_BASH if config.shell == "bash" else _ZSH).replace("@CASES@", "\n".join(_cases())))
    return DONE


def _cases() -> Iterator[str]:
    """For every place in a command line, by the words before it, what can come next."""

    def case(place: str, words: Iterable[str], *, files: bool = False) -> str:
        return f'    "{place}") _dpps_words="{" ".join(words)}"; _dpps_files={int(files)} ;;'

    def values(option: Option) -> list[str]:
        """Forms such as label:K cannot be completed."""
        return [c for c in option.choices if not re.search("K|ALPHA|CALLABLE|PREFIX|N", c)]

    yield case("", [*COMMANDS, "--help", "--version"])
    for name, found in COMMANDS.items():
        if isinstance(found, Group):
            yield case(name, [*found.commands, "--help"])
    for words, command in commands():
        name, options = " ".join(words), options_of(command.kind())
        named, places = ([o for o in options if o.positional == here] for here in (False, True))
        for option in named:
            if option.value:
                yield case(f"{name}|{option.flag}", values(option), files=option.is_path)
        flags = [*chain.from_iterable(map(values, places)), *(option.flag for option in named)]
        yield case(name, flags, files=any(option.is_path for option in places))


_BASH = """\
# Completion of dpps. What can come at a place of a command line, by the words before it:
_dpps_at() {
  _dpps_words=""; _dpps_files=0
  case "$1" in
@CASES@
    *) return 1 ;;
  esac
}

_dpps() {
  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" place="" word
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do  # the command: one word or two
    _dpps_at "${place:+$place }$word" || break
    place="${place:+$place }$word"
  done
  _dpps_at "$place|$before" || _dpps_at "$place"
  COMPREPLY=($(compgen -W "$_dpps_words" -- "$current"))
  if [ "$_dpps_files" = 1 ]; then
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$current")
  fi
}

complete -o filenames -F _dpps dpps"""

_ZSH = f"""\
autoload -Uz compinit bashcompinit
compinit
bashcompinit
{_BASH}"""
