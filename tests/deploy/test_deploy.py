# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/ pass the tools that read them, and fit together."""

import json
import re
import runpy
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import external_tools, promql
from tests.helpers.row_fallbacks import ROW_FALLBACKS
from vllm_sparse_backend.config.settings import load_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MONITORING = DEPLOY / "monitoring"
KUBERNETES = DEPLOY / "kubernetes"


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


(COMPOSE,) = documents(DEPLOY / "compose.yaml")
SERVERS = documents(KUBERNETES / "server.yaml")
ALERTS = [rule for group in documents(MONITORING / "alerts.yml")[0]["groups"] for rule in group["rules"]]


def option(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", DEPLOY / "Dockerfile"),
        ("docker-compose", "-f", DEPLOY / "compose.yaml", "--profile", "monitoring", "config", "-q"),
        ("promtool", "check", "config", MONITORING / "prometheus.yml"),
        ("kubernetes-validate", "--strict", "-k", "1.29", KUBERNETES / "server.yaml"),
        ("kubernetes-validate", "--strict", "-k", "1.37", KUBERNETES / "server.yaml"),
    ],
    ids=lambda command: f"{command[0]} {command[-1]}",
)
def test_files_are_valid(command: tuple[object, ...]) -> None:
    external_tools.check(*map(str, command), env={"MODEL": "/model"})


def test_every_query_is_promql(tmp_path: Path) -> None:
    queries = [*promql.documented_queries().values(), *promql.dashboard_queries().values()]
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    external_tools.check("promtool", "check", "rules", tmp_path / "rules.yml")


def test_alerts_fire_for_one_bad_server_of_many(tmp_path: Path) -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts.yml").read_text())
    (tmp_path / "tests.yml").write_text(json.dumps({**cases, "rule_files": [str(MONITORING / "alerts.yml")]}))
    external_tools.check("promtool", "test", "rules", tmp_path / "tests.yml")
    for rule in ALERTS:
        assert rule["alert"] in json.dumps(cases), rule["alert"]
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert f"\n## {anchor.capitalize()}\n" in (ROOT / page).read_text()


def test_operators_are_told_of_every_alert_and_reason() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    alerts = {rule["alert"] for rule in ALERTS}
    assert [name for name in (*alerts, *(reason.value for reason in ROW_FALLBACKS)) if f"`{name}`" not in text] == []
    assert set(re.findall(r"SparsePrefill\w+", text)) <= alerts


def test_compose_mounts_and_scrapes_what_is_there() -> None:
    services = COMPOSE["services"]
    mounted = [volume.split(":") for service in services.values() for volume in service["volumes"]]
    files = {source: target for source, target, *_ in mounted if source.startswith("./")}
    assert files
    assert [source for source in files if not (DEPLOY / source).is_file()] == []
    provider = yaml.safe_load((MONITORING / "grafana/dashboards.yml").read_text())["providers"][0]
    assert str(Path(files["./monitoring/grafana/sparse-prefill.json"]).parent) == provider["options"]["path"]
    (job,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["vllm:8000"]}]


def test_nothing_in_a_container_may_be_written_but_what_is_mounted() -> None:
    for service in COMPOSE["services"].values():
        hardening = service["read_only"], service["cap_drop"], service["security_opt"]
        assert hardening == (True, ["ALL"], ["no-new-privileges:true"])


def test_kubernetes_names_fit_together() -> None:
    """Every deployment has one service, whose port its container listens on, and the volumes that it mounts."""
    (monitor,) = documents(KUBERNETES / "servicemonitor.yaml")
    (endpoint,), (scraped,) = monitor["spec"]["endpoints"], monitor["spec"]["selector"]["matchExpressions"]
    for deployment in (part for part in SERVERS if part["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]
        labels, (container,) = pod["metadata"]["labels"], pod["spec"]["containers"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (service,) = (
            part for part in SERVERS if part["kind"] == "Service" and part["spec"]["selector"].items() <= labels.items()
        )
        (port,), (listening,) = service["spec"]["ports"], container["ports"]
        assert port["targetPort"] == listening["name"]
        assert option(container["args"], "--port") == str(listening["containerPort"])
        assert container["securityContext"]["readOnlyRootFilesystem"]
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounts == {volume["name"] for volume in pod["spec"].get("volumes", [])}
        name = service["metadata"]["labels"]["app.kubernetes.io/name"]
        assert (endpoint["port"], name in scraped["values"]) == (port["name"], True)
        user = pod["spec"]["securityContext"]["runAsUser"]
        assert f"USER {user}\n" in (DEPLOY / "Dockerfile").read_text()


def test_containers_have_as_long_to_start_everywhere() -> None:
    (minutes,) = re.findall(r"--start-period=(\d+)m", (DEPLOY / "Dockerfile").read_text())
    text = "".join(path.read_text() for path in KUBERNETES.glob("*.yaml"))
    probes = re.findall(r"startupProbe:.*?periodSeconds: (\d+).*?failureThreshold: (\d+)", text, re.DOTALL)
    assert [int(period) * int(failures) for period, failures in probes] == [int(minutes) * 60] * 2


@pytest.mark.parametrize(
    ("command", "address"),
    [
        (["vllm", "serve", "/model", "--port", "9000", "--host", "0.0.0.0"], "http://127.0.0.1:9000"),
        (["vllm", "serve", "--host=10.0.0.7", "--port=1", "--port=9001"], "http://10.0.0.7:9001"),
        (["vllm", "serve", "--ssl_certfile", "c.pem", "--host", "::"], "https://::1:8000"),
        (["vllm", "serve", "--config", "CONFIG", "--port", "9002"], "https://10.0.0.8:9002"),
    ],
)
def test_health_check_follows_the_server(command: list[str], address: str, tmp_path: Path) -> None:
    (config := tmp_path / "config.yaml").write_text("port: 9000\nhost: 10.0.0.8\nssl-certfile: c.pem\n")
    check = runpy.run_path(str(DEPLOY / "healthcheck.py"))
    given = check["options"]([str(config) if part == "CONFIG" else part for part in command])
    assert check["connection"](given)[0] == address


@pytest.mark.parametrize(("command", "asks"), [(["--headless", "--port", "1"], False), (["--config", "CONFIG"], True)])
def test_a_node_without_a_server_is_healthy(
    command: list[str], asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config := tmp_path / "config.yaml").write_text("headless: false\nport: 1\n")
    (cmdline := tmp_path / "cmdline").write_text("\0".join([*command, ""]).replace("CONFIG", str(config)))
    check = runpy.run_path(str(DEPLOY / "healthcheck.py"))
    monkeypatch.setattr("sys.argv", ["healthcheck.py"])
    files = {"/proc/1/cmdline": cmdline}
    monkeypatch.setitem(check["main"].__globals__, "Path", lambda path: files.get(path, Path(path)))
    with pytest.raises(SystemExit, match="no answer from http://127") if asks else nullcontext():
        check["main"]()


def test_entry_point_refuses_another_backend() -> None:
    """The entry point adds its own flag last, which wins silently."""
    command = [DEPLOY / "entrypoint.sh", "/model", "--attention_backend=FLASH_ATTN"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "given --attention_backend=FLASH_ATTN, expected no such argument" in done.stderr


def test_production_stack_serves_this_backend() -> None:
    (values,) = documents(KUBERNETES / "production-stack.yaml")
    (model,) = values["servingEngineSpec"]["modelSpec"]
    args = model["vllmConfig"]["extraArgs"]
    assert option(args, "--attention-backend") == "sparse-prefill"
    load_config(json.loads(option(args, "--additional-config")))
    assert model["requestGPU"] == model["vllmConfig"]["tensorParallelSize"]


def test_workflow_actions_are_pinned_by_commit() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for action in re.findall(r"uses: ([^\s]+)", path.read_text()):
            assert action.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), (path, action)
