"""The dashboard and the alert rules name what is exported, by its names in Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.telemetry import Ear, use_every_instrument

yaml = pytest.importorskip("yaml")

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
DASHBOARD = json.loads((ASSETS / "grafana-dashboard.json").read_text("utf-8"))
RULES = yaml.safe_load((ASSETS / "prometheus-alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
FROM_PROMETHEUS = {"job", "instance", "le"}


def exported() -> dict[str, set[str]]:
    """Return the series in Prometheus, and the labels of each.

    OpenTelemetry's rules: a unit in braces is dropped, `s` becomes `_seconds`, a counter ends in `_total`,
    and a histogram has three series.
    """
    ear = Ear()
    use_every_instrument(ear.telemetry)
    found: dict[str, set[str]] = {}
    for metric in ear.metrics():
        name = metric.name.replace(".", "_")
        if not metric.unit.startswith("{"):
            name += {"s": "_seconds"}[metric.unit]
        kind = type(metric.data).__name__
        ends = {"Sum": ["_total"], "Gauge": [""], "Histogram": ["_bucket", "_count", "_sum"]}[kind]
        labels = {
            label.replace(".", "_") for point in metric.data.data_points for label in point.attributes or ()
        }
        found |= {name + end: labels for end in ends}
    return found


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (rule["expr"] for rule in RULES)
    yield from (rule["annotations"]["description"] for rule in RULES)


def named(expression: str) -> tuple[set[str], set[str]]:
    """Return the series of an expression, and its labels."""
    without_text = re.sub(r'"[^"]*"', '""', expression)
    names = set(re.findall(r"\b(?:stm|db)_\w+", without_text))
    labels = set(re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"\"", without_text))
    for listed in re.findall(r"\bby \(([^)]*)\)", without_text):
        labels |= {label.strip() for label in listed.split(",")}
    labels |= set(re.findall(r"\$labels\.(\w+)", expression))
    return names - labels, labels


@pytest.mark.parametrize("expression", [*expressions()])
def test_every_series_and_label_that_is_named_is_exported(expression: str) -> None:
    series, labels = named(expression)
    known = exported()
    assert series <= known.keys()
    of_series = {label for name in series or known for label in known[name]}
    assert labels <= of_series | FROM_PROMETHEUS


def test_the_dashboard_shows_every_metric() -> None:
    shown = {
        name for panel in DASHBOARD["panels"] for one in panel["targets"] for name in named(one["expr"])[0]
    }
    ends = ("_bucket", "_count", "_sum")
    metrics = {name for name in exported() if not name.endswith(ends)}
    assert metrics <= shown
    assert {
        "db_client_operation_duration_seconds_bucket",
        "db_client_operation_duration_seconds_count",
    } <= shown


def test_each_alert_has_a_name_of_its_own_a_severity_and_a_text() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len({*names}) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_dashboard_can_be_imported_with_any_prometheus() -> None:
    assert "id" not in DASHBOARD
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    everything: list[dict[str, Any]] = [*DASHBOARD["panels"], variables["job"]]
    everything += [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert {one["datasource"]["uid"] for one in everything} == {"${datasource}"}
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len({*places}) == len(places) == len({panel["id"] for panel in DASHBOARD["panels"]})
