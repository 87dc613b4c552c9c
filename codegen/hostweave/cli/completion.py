"""`hostweave completion`: prints scripts with which shells complete commands and options."""

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "fish", "zsh")

_BASH = """\
# eval "$(hostweave completion bash)" in ~/.bashrc
_hostweave() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _hostweave hostweave
"""
_ZSH = """\
# eval "$(hostweave completion zsh)" in ~/.zshrc, after compinit
_hostweave() {{
  local -a found
  case "${{words[2]}}" in
{cases}
  esac
  (( CURRENT == 2 )) && found=({commands})
  compadd -a found
  (( CURRENT == 2 )) || _files
}}
compdef _hostweave hostweave
"""


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Returns the script for one of SHELLS, which completes commands, options and positional choices."""
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish(parser))
    template, case = (_BASH, '    {}) words="{}" ;;') if shell == "bash" else (_ZSH, "    {}) found=({}) ;;")
    words = {name: " ".join(word for word, _ in _words(sub)) for name, (sub, _) in commands_of(parser).items()}
    return template.format(cases="\n".join(case.format(*each) for each in words.items()), commands=" ".join(words))


def commands_of(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
    return {name: (sub, helps[name]) for name, sub in action.choices.items()}


def _words(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yields the words that can follow a command, each with its help."""
    for action in parser._actions:
        for word in action.option_strings or action.choices or ():
            yield str(word), action.help or ""


def _fish(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield "# hostweave completion fish > ~/.config/fish/completions/hostweave.fish"
    for name, (sub, help) in commands_of(parser).items():
        yield f"complete -c hostweave -n __fish_use_subcommand -a {name} -d {_quoted(help)}"
        for word, about in _words(sub):
            option = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" if word.startswith("-") else f"-a {word}"
            yield f"complete -c hostweave -n '__fish_seen_subcommand_from {name}' {option} -d {_quoted(about)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
