"""`dpps completion`: scripts for shells, made from the tree of commands."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from dpps.cli.help import Option, options_of
from dpps.cli.main import COMMANDS, DONE, Group, commands, parse_options

_PLACEHOLDER = ("K", "ALPHA", "CALLABLE", "PREFIX", "N")


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


def _cases() -> list[str]:
    """For every place in a command line, by the words before it, what can come next."""
    groups = {name: " ".join(found.commands) for name, found in COMMANDS.items() if isinstance(found, Group)}
    cases = [_case("", f"{' '.join(COMMANDS)} --help --version", files=False)]
    cases += [_case(name, f"{inner} --help", files=False) for name, inner in groups.items()]
    for words, command in commands():
        name, options = " ".join(words), options_of(command.kind())
        named = [option for option in options if not option.positional]
        for option in named:
            if option.value:
                cases.append(_case(f"{name}|{option.flag}", _words(option), files=option.is_path))
        places = [option for option in options if option.positional]
        more = " ".join(_words(option) for option in places)
        flags = " ".join(option.flag for option in named)
        cases.append(_case(name, f"{more} {flags}".strip(), files=any(option.is_path for option in places)))
    return cases


def _words(option: Option) -> str:
    """The values that can be completed; forms such as label:K cannot."""
    return " ".join(c for c in option.choices if not any(p in c for p in _PLACEHOLDER))


def _case(place: str, words: str, *, files: bool) -> str:
    return f'    "{place}") _dpps_words="{words}"; _dpps_files={int(files)} ;;'


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
