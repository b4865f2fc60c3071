"""The page itself: text and tables written here, charts drawn by the page's own script from the data beside them."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from dpps.privacy.accountant import NO_PROTECTION, label
from dpps.privacy.statement import Privacy
from dpps.report.charts import Chart, charts
from dpps.report.networks import network
from dpps.report.story import Story

TABLE_ROWS = 40
"""The table below a chart shows at most about this many of its points."""
TABLE_LINKS = 400
"""A phase with more links is not spelled out."""

_PROTECTED = {
    "record": "protects one training example",
    "contribution": "protects all a node contributes",
    "node-swap": "protects which node sent a message",
    "none": "messages were sent without noise",
}


_PLACES = ("out", "data-dir", "node-data", "resume", "overwrite", "quiet", "checkpoint-every", "timeout")
_NOTHING = "-"


def render(stories: Sequence[Story]) -> str:
    """The HTML of one run, or of a comparison."""
    drawn, networks = charts(stories), _networks(stories)
    data = {
        "charts": [chart.to_json() for chart in drawn],
        "networks": networks,
        "compare": len(stories) > 1,
    }
    one = len(stories) == 1
    heading = stories[0].title if one else f"{len(stories)} runs compared"
    body = [
        _banner(stories),
        _headline(stories[0]) if one else _comparison(stories),
        _figures(drawn),
        _network_figures(networks, _words(stories) if one else _differences(stories)),
        _configuration(stories[0]) if one else _words(stories),
    ]
    return Template(_asset("page.html")).substitute(
        title=escape(f"{heading} - dpps report"),
        heading=escape(heading),
        subtitle=escape(_subtitle(stories)),
        style=_asset("style.css"),
        body="\n".join(part for part in body if part),
        # "<" never appears in the data, so nothing in a name can end the script element
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=_asset("charts.js"),
    )


def _asset(name: str) -> str:
    return files("dpps.report").joinpath(name).read_text(encoding="utf-8")


def _subtitle(stories: Sequence[Story]) -> str:
    if len(stories) > 1:
        return ", ".join(story.name for story in stories)
    story = stories[0]
    shared, local = story.shared_parameters, story.local_parameters
    sizes = (
        f"{shared:,} parameters shared, {local:,} local. " if shared is not None and local is not None else ""
    )
    return f"{story.name}. {sizes}Network {story.topology!r}."


def _banner(stories: Sequence[Story]) -> str:
    names = [story.name for story in stories if not story.finished]
    if not names:
        return ""
    who = "This run is" if len(stories) == 1 else f"{', '.join(names)}:"
    text = f"{who} unfinished; shown is what was on disk when this page was written."
    return f'<p class="banner" role="note">{escape(text)}</p>'


# Numbers first


def _headline(story: Story) -> str:
    cards = [
        ("Accuracy", *_accuracy_card(story)),
        ("Privacy spent", *_privacy_card(story.privacy)),
        ("Rounds", f"{len(story.rounds):,}", _rounds_note(story)),
        ("Time", _time(story.seconds.get("total")), _time_note(story.seconds)),
    ]
    items = "".join(
        f'<div class="card"><dt>{name}</dt><dd><strong>{value}</strong><span>{note}</span></dd></div>'
        for name, value, note in cards
    )
    return f'<dl class="headline" aria-label="In short">{items}</dl>'


def _accuracy_card(story: Story) -> tuple[str, str]:
    unknown = "not told by the nodes" if story.part else "not measured"
    note = unknown if story.accuracy is None else "on the test set, mean over the nodes"
    if story.accuracy is None and story.accuracy_by_epoch:
        return _percent(story.accuracy_by_epoch[-1]), f"after epoch {len(story.accuracy_by_epoch)}"
    if story.own_accuracy is not None:
        note += f"; {_percent(story.own_accuracy)} on each node's own kind of data"
    return _percent(story.accuracy), note


def _privacy_card(privacy: Privacy) -> tuple[str, str]:
    if privacy.unit == "none":
        return "none", f"{_badge('no protection')} {_PROTECTED['none']}"
    note = f"delta {_tiny(privacy.delta)}; {_PROTECTED.get(privacy.unit, privacy.unit)}"
    return f"ε {_epsilon(privacy)}", f"{_warning(privacy)}{note}"


def _epsilon(privacy: Privacy) -> str:
    """The number alone, rounded up as everywhere."""
    text = label(float("inf") if privacy.epsilon is None else privacy.epsilon)
    number = text.removeprefix("epsilon ").partition(" (")[0]
    return number if privacy.epsilon is None else f"{Decimal(number):,}"


def _warning(privacy: Privacy) -> str:
    useless = privacy.epsilon is None or privacy.epsilon > NO_PROTECTION
    return f"{_badge('no meaningful protection')} " if useless else ""


def _badge(text: str) -> str:
    return f'<em class="badge">{escape(text)}</em>'


def _rounds_note(story: Story) -> str:
    epochs = len(story.accuracy_by_epoch)
    parts = [f"{epochs} epoch{'s' if epochs != 1 else ''}"] if epochs else []
    if story.bytes_sent:
        parts.append(f"{_bytes(story.bytes_sent)} sent by a node")
    return ", ".join(parts) or "so far"


def _time_note(seconds: Mapping[str, float]) -> str:
    parts = [f"{name} {_time(value)}" for name, value in seconds.items() if name != "total"]
    return ", ".join(parts) or "not recorded"


def _comparison(stories: Sequence[Story]) -> str:
    head = ["run", "accuracy", "epsilon", "delta", "unit", "rounds", "sent by a node", "time"]
    rows = [
        [
            f'<span class="key" data-tone="{tone}"></span>{escape(story.name)}',
            _accuracy_card(story)[0],
            "none"
            if story.privacy.unit == "none"
            else f"{_epsilon(story.privacy)} {_warning(story.privacy)}",
            "" if story.privacy.unit == "none" else _tiny(story.privacy.delta),
            escape(story.privacy.unit),
            f"{len(story.rounds):,}" + ("" if story.finished else " (unfinished)"),
            _bytes(story.bytes_sent) if story.bytes_sent else _NOTHING,
            _time(story.seconds.get("total")),
        ]
        for tone, story in enumerate(stories)
    ]
    return f'<section class="wide"><h2>In short</h2>{_table(head, rows, "cards")}</section>'


# Figures


def _figures(drawn: Sequence[Chart]) -> str:
    return (
        f'<section class="figures" aria-label="Charts">{"".join(_figure(chart) for chart in drawn)}</section>'
    )


def _figure(chart: Chart) -> str:
    return (
        f'<figure class="chart" id="{chart.key}"><figcaption><h2>{escape(chart.title)}</h2>'
        f'<p>{escape(chart.caption)}</p></figcaption><div class="legend"></div><div class="plot"></div>'
        f"{_values(chart)}</figure>"
    )


def _values(chart: Chart) -> str:
    step = -(-len(chart.x) // TABLE_ROWS)
    places = sorted({*range(0, len(chart.x), step), len(chart.x) - 1})
    rows = [[str(chart.x[k]), *(_number(series.y[k]) for series in chart.series)] for k in places]
    names = [chart.x_label, *(escape(series.name) for series in chart.series)]
    return _details(f"Values of {chart.title.lower()} as a table", _table(names, rows))


def _networks(stories: Sequence[Story]) -> list[dict[str, Any]]:
    """One drawing for each different network; what is said about it may differ between its runs."""
    different: dict[str, list[dict[str, Any]]] = {}
    for story in stories:
        drawn = network(story)
        different.setdefault(drawn["label"], []).append(drawn)
    return [_merged(same) for same in different.values()]


def _merged(same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    notes = [drawn["note"] for drawn in same]
    if len(set(notes)) == 1:
        note = notes[0]
    else:
        note = " ".join(f"{drawn['name']}: {drawn['note']}" for drawn in same if drawn["note"])
    return {**same[0], "name": ", ".join(drawn["name"] for drawn in same), "note": note}


def _network_figures(networks: Sequence[dict[str, Any]], beside: str) -> str:
    figures = "".join(_network_figure(k, drawn, len(networks) > 1) for k, drawn in enumerate(networks))
    return f'<div class="figures">{figures}{beside}</div>'


def _network_figure(k: int, drawn: dict[str, Any], several: bool) -> str:
    last = len(drawn["phases"]) - 1
    who = f" of {escape(drawn['name'])}" if several else ""
    hidden = " hidden" if last == 0 else ""
    return (
        f'<figure class="network" id="network-{k}"><figcaption><h2>Network{who}</h2>'
        f"<p>{escape(drawn['label'])}: who sends to whom. {escape(drawn['note'])}</p></figcaption>"
        f'<div class="phase"{hidden}><label for="phase-{k}">Phase</label>'
        f'<input id="phase-{k}" type="range" min="0" max="{last}" value="0" step="1"></div>'
        f'<output for="phase-{k}" class="phase-title"></output><div class="plot"></div>'
        f'<p class="reading" role="status"></p>{_links(drawn)}</figure>'
    )


def _links(drawn: dict[str, Any]) -> str:
    rows = [[escape(phase["title"]), _spelled(phase["edges"])] for phase in drawn["phases"]]
    return _details("Links of every phase as a table", _table(["phase", "sender → receivers"], rows))


def _spelled(edges: Sequence[tuple[int, int, float]]) -> str:
    if len(edges) > TABLE_LINKS:
        return f"{len(edges)} links"
    receivers: dict[int, list[int]] = {}
    for sender, receiver, _ in edges:
        receivers.setdefault(sender, []).append(receiver)
    return "; ".join(f"{s} → {', '.join(map(str, sorted(receivers[s])))}" for s in sorted(receivers))


# Words


def _words(stories: Sequence[Story]) -> str:
    return f'<div class="stack">{_privacy(stories)}{_reproduction(stories)}</div>'


def _privacy(stories: Sequence[Story]) -> str:
    return _each("What the privacy means", stories, lambda story: _statement(story.privacy.statement))


def _reproduction(stories: Sequence[Story]) -> str:
    return _each("How to reproduce", stories, _how)


def _each(heading: str, stories: Sequence[Story], words: Callable[[Story], str]) -> str:
    """A section with the words of one run, or with those of several under their names."""
    if len(stories) == 1:
        return f'<section class="words"><h2>{heading}</h2>{words(stories[0])}</section>'
    parts = "".join(f"<div><h3>{escape(story.name)}</h3>{words(story)}</div>" for story in stories)
    return f'<section class="words"><h2>{heading}</h2><div class="several">{parts}</div></section>'


def _statement(text: str) -> str:
    """A paragraph for each part; its opening words in bold."""
    parts = re.split(r"\s+(?=Guarantee:|Not covered:|This run was a simulation)", text)
    opening = re.compile(r"^(Protected:|Guarantee:|Not covered:|No protection:)")
    bold = [opening.sub(r"<b>\1</b>", escape(part)) for part in parts]
    return "".join(f"<p>{part}</p>" for part in bold)


def _options(story: Story) -> dict[str, str]:
    """The options that decide what is computed; where files lie is nobody else's business."""
    return {name: _setting(value) for name, value in story.config.items() if name not in _PLACES}


def _configuration(story: Story) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in _options(story).items()
    )
    return f'<section class="words"><h2>Configuration</h2><dl class="options">{items}</dl></section>'


def _differences(stories: Sequence[Story]) -> str:
    options = [_options(story) for story in stories]
    names = dict.fromkeys(name for each in options for name in each)
    rows = [[escape(name), *(each.get(name, _NOTHING) for each in options)] for name in names]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    head = ["option", *(escape(story.name) for story in stories)]
    what = _table(head, differ) if differ else "<p>All options are the same.</p>"
    rest = _details("All options", _table(head, rows))
    return f'<section class="wide"><h2>Where the configurations differ</h2>{what}{rest}</section>'


def _how(story: Story) -> str:
    with_versions = ", ".join(f"{name} {value}" for name, value in story.versions.items())
    if story.command is None:
        text = "<p>This run was started from Python: repeat the script with these settings, the seed included.</p>"
    else:
        text = f'<pre tabindex="0" role="group" aria-label="Command line"><code>{_unbroken(story.command)}</code></pre>'
    seed = " The noise was not seeded: numbers will differ a little." if story.fresh_noise else ""
    return f'{text}<p class="small">With {escape(with_versions)}.{seed}</p>'


def _unbroken(command: str) -> str:
    """A line may break between options, not within one."""
    return " ".join(f"<span>{escape(part)}</span>" for part in re.split(r" (?=--)", command))


# Pieces


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = "".join(_row(head, row) for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="Table"><table class="{kind}">'
        f"<thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _row(head: Sequence[str], row: Sequence[str]) -> str:
    first, *rest = row
    cells = "".join(
        f'<td data-head="{escape(name, quote=True)}">{cell}</td>'
        for name, cell in zip(head[1:], rest, strict=True)
    )
    return f'<tr><th scope="row">{first}</th>{cells}</tr>'


def _details(summary: str, inside: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def _setting(value: object) -> str:
    if value is None:
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _tiny(value) if isinstance(value, float) else escape(str(value))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.1f} %"


def _tiny(value: float) -> str:
    return re.sub(r"e-0*", "e-", f"{value:g}")


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
