# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/ pass the tools that read them, and refer only to existing names."""

import http.server
import json
import re
import runpy
import socketserver
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.helpers import external_tools, promql
from tests.helpers.row_fallbacks import ROW_FALLBACKS
from vllm_sparse_backend.config.metrics import METRICS
from vllm_sparse_backend.config.settings import load_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SAMPLES = {metric.sample: metric for metric in METRICS.values()}
OF_PROMETHEUS = {"instance", "job", "le"}
QUERIES = {f"docs: {name}": query for name, query in promql.documented_queries().items()}
QUERIES |= {f"dashboard: {name}": query for name, query in promql.dashboard_queries().items()}
SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
PAIR = yaml.safe_load((DEPLOY / "disaggregated.compose.yaml").read_text())["services"]
GROUPS = yaml.safe_load((DEPLOY / "monitoring/alerts.yml").read_text())["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"]]
QUERIES |= {f"alert: {rule['alert']}": rule["expr"] for rule in ALERTS}


def test_dockerfile() -> None:
    external_tools.check("hadolint", DEPLOY / "Dockerfile")


@pytest.mark.parametrize(
    ("name", "profiles"),
    [("compose.yaml", []), ("compose.yaml", ["monitoring"]), ("disaggregated.compose.yaml", [])],
)
def test_compose(name: str, profiles: list[str]) -> None:
    flags = [flag for profile in profiles for flag in ("--profile", profile)]
    external_tools.check("docker-compose", "-f", DEPLOY / name, *flags, "config", "-q", env={"MODEL": "/model"})


def test_compose_mounts_what_is_there() -> None:
    mounted = [volume.split(":") for service in SERVICES.values() for volume in service["volumes"]]
    files = {source: target for source, target, *_ in mounted if source.startswith("./")}
    assert len(files) == 5
    for source in files:
        assert (DEPLOY / source).is_file()
    provider = yaml.safe_load((DEPLOY / "monitoring/grafana/dashboards.yml").read_text())["providers"][0]
    assert str(Path(files["./monitoring/grafana/sparse-prefill.json"]).parent) == provider["options"]["path"]


def test_prometheus() -> None:
    external_tools.check("promtool", "check", "config", DEPLOY / "monitoring/prometheus.yml")
    (job,) = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["vllm:8000"]}]  # the service and its port in compose.yaml


def test_every_query_is_promql(tmp_path: Path) -> None:
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(QUERIES.values())]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    external_tools.check("promtool", "check", "rules", tmp_path / "rules.yml")


def test_alerts_fire_for_one_bad_server_of_many(tmp_path: Path) -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts.yml").read_text())
    (tmp_path / "tests.yml").write_text(json.dumps({**cases, "rule_files": [str(DEPLOY / "monitoring/alerts.yml")]}))
    external_tools.check("promtool", "test", "rules", tmp_path / "tests.yml")
    for rule in ALERTS:
        assert rule["alert"] in json.dumps(cases), rule["alert"]
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert f"\n## {anchor.capitalize()}\n" in (ROOT / page).read_text()


@pytest.mark.parametrize("name", QUERIES)
def test_queries_name_metrics_and_labels_that_there_are(name: str) -> None:
    query = QUERIES[name]
    metrics = [metric for metric in promql.METRIC.findall(query) if not metric.startswith("vllm:")]
    assert metrics or "vllm:" in query
    labels = OF_PROMETHEUS.copy()
    for metric in metrics:
        labels |= set(SAMPLES[metric].all_labels)
    used = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
    used += [label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")]
    assert set(used) <= labels


def test_operators_are_told_of_every_alert_and_reason() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    for name in [rule["alert"] for rule in ALERTS] + [reason.value for reason in ROW_FALLBACKS]:
        assert f"`{name}`" in text, name
    assert set(re.findall(r"SparsePrefill\w+", text)) <= {rule["alert"] for rule in ALERTS}
    assert {m for m in promql.METRIC.findall(text) if not m.startswith("vllm:")} <= set(SAMPLES)


def test_dashboard() -> None:
    dashboard = json.loads(promql.DASHBOARD.read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", promql.DASHBOARD.read_text())) == {*variables, "__rate_interval", "__all"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["description"]
        for label in re.findall(r"\{\{(\w+)\}\}", " ".join(target["legendFormat"] for target in panel["targets"])):
            assert all(label in target["expr"] or _has(target["expr"], label) for target in panel["targets"])


def _has(query: str, label: str) -> bool:
    """Return whether an expression that sums nothing keeps a label of its metric."""
    metrics = promql.METRIC.findall(query)
    return " by (" not in query and all(label in (*SAMPLES[metric].all_labels, "instance") for metric in metrics)


@pytest.mark.parametrize("name", ["server.yaml", "disaggregated.yaml"])
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes(version: str, name: str) -> None:
    external_tools.check("kubernetes-validate", "--strict", "-k", version, KUBERNETES / name)


def test_kubernetes_names_fit_together() -> None:
    documents = {
        document["kind"]: document for document in yaml.safe_load_all((KUBERNETES / "server.yaml").read_text())
    }
    kinds = ("Service", "Deployment", "PersistentVolumeClaim", "NetworkPolicy")
    service, deployment, claim, policy = (documents[kind] for kind in kinds)
    monitor = yaml.safe_load((KUBERNETES / "servicemonitor.yaml").read_text())
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == pod["metadata"]["labels"]
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    (port,) = service["spec"]["ports"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == port["name"]
    assert container["args"][container["args"].index("--port") + 1] == ports[port["targetPort"]]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert container["args"][container["args"].index("--tensor-parallel-size") + 1] == gpus
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    claimed = [
        volume["persistentVolumeClaim"] for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claim["metadata"]["name"] in {volume["claimName"] for volume in claimed}
    assert policy["spec"]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": "http"}]
    user = str(pod["spec"]["securityContext"]["runAsUser"])
    assert f"USER {user}\n" in (DEPLOY / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("command", "address"),
    [
        (["python3", "vllm", "serve", "/model"], "http://127.0.0.1:8000"),
        (["vllm", "serve", "/model", "--port", "9000", "--host", "0.0.0.0"], "http://127.0.0.1:9000"),
        (["vllm", "serve", "--host=10.0.0.7", "--port=1", "--port=9001"], "http://10.0.0.7:9001"),
        (["vllm", "serve", "--ssl_certfile", "c.pem", "--host", "::"], "https://::1:8000"),
        (["vllm", "serve", "--uds", "/tmp/vllm.sock", "--port", "9000"], "unix:/tmp/vllm.sock"),
        (["vllm", "serve", "--config", "CONFIG", "--port", "9002"], "https://10.0.0.8:9002"),
    ],
)
def test_health_check_follows_the_server(command: list[str], address: str, tmp_path: Path) -> None:
    (config := tmp_path / "config.yaml").write_text("port: 9000\nhost: 10.0.0.8\nssl-certfile: c.pem\n")
    check = runpy.run_path(str(DEPLOY / "healthcheck.py"))
    given = check["options"]([str(config) if part == "CONFIG" else part for part in command])
    assert check["connection"](given)[0] == address


def test_health_check_asks_a_unix_socket(tmp_path: Path) -> None:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def address_string(self) -> str:
            return "client"

    path = str(tmp_path / "vllm.sock")
    with socketserver.UnixStreamServer(path, Health) as server:
        threading.Thread(target=server.handle_request).start()
        _, asked = runpy.run_path(str(DEPLOY / "healthcheck.py"))["connection"]({"uds": path})
        asked.request("GET", "/health")
        assert asked.getresponse().status == 200


@pytest.mark.parametrize("argument", ["--attention-backend", "--attention_backend=FLASH_ATTN"])
def test_entry_point_refuses_another_backend(argument: str) -> None:
    """The entry point adds its own flag last, which wins silently."""
    done = subprocess.run([DEPLOY / "entrypoint.sh", "/model", argument, "X"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"given {argument}, expected no such argument" in done.stderr


def test_containers_have_as_long_to_start_everywhere() -> None:
    (minutes,) = re.findall(r"--start-period=(\d+)m", (DEPLOY / "Dockerfile").read_text())
    documents = [d for name in ("server", "disaggregated") for d in _documents(f"{name}.yaml")]
    pods = [document["spec"]["template"]["spec"] for document in documents if document["kind"] == "Deployment"]
    probes = [c["startupProbe"] for pod in pods for c in pod["containers"] if "startupProbe" in c]
    probes += [spec["servingEngineSpec"]["startupProbe"] for spec in _documents("production-stack.yaml")]
    assert len(probes) == 4
    for probe in probes:
        assert probe["periodSeconds"] * probe["failureThreshold"] == int(minutes) * 60


def test_metrics_of_every_server_are_scraped() -> None:
    (monitor,) = _documents("servicemonitor.yaml")
    (rule,) = monitor["spec"]["selector"]["matchExpressions"]
    servers = [
        document["metadata"]["labels"]["app.kubernetes.io/name"]
        for name in ("server", "disaggregated")
        for document in _documents(f"{name}.yaml")
        if document["kind"] == "Service"
    ]
    assert (rule["key"], rule["operator"]) == ("app.kubernetes.io/name", "In")
    assert {*rule["values"], "sparse-prefill-proxy"} == {*servers}


def _documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def test_nothing_in_a_container_may_be_written_but_what_is_mounted() -> None:
    for service in (*SERVICES.values(), *PAIR.values()):
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


class PairFile(NamedTuple):
    """The servers that a recipe for a disaggregated pair starts, by role: prefill, decode, proxy."""

    entrypoints: dict[str, list[str]]
    """Programs that replace the image's entry point."""
    args: dict[str, list[str]]
    env: dict[str, dict[str, object]]
    ports: dict[str, str]
    """Address of each role, by the name that other roles use: HOST:PORT."""


def pair_of_compose() -> PairFile:
    args = {role: service["command"] for role, service in PAIR.items()}
    return PairFile(
        {role: service["entrypoint"] for role, service in PAIR.items() if "entrypoint" in service},
        args,
        {role: service.get("environment", {}) for role, service in PAIR.items()},
        {role: f"{role}:{option(command, '--port')}" for role, command in args.items()},
    )


def pair_of_kubernetes() -> PairFile:
    documents = list(yaml.safe_load_all((KUBERNETES / "disaggregated.yaml").read_text()))
    services = [document for document in documents if document["kind"] == "Service"]
    pair = PairFile({}, {}, {}, {})
    for document in documents:
        if document["kind"] != "Deployment":
            continue
        pod = document["spec"]["template"]
        labels, (container,) = pod["metadata"]["labels"], pod["spec"]["containers"]
        assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()
        role = document["metadata"]["name"].removeprefix("sparse-prefill-")
        (service,) = (service for service in services if service["spec"]["selector"].items() <= labels.items())
        (port,), (listening,) = service["spec"]["ports"], container["ports"]
        assert port["targetPort"] == listening["name"]
        assert option(container["args"], "--port") == str(listening["containerPort"])
        assert container["securityContext"]["readOnlyRootFilesystem"]
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounts == {volume["name"] for volume in pod["spec"].get("volumes", [])}
        if "command" in container:
            pair.entrypoints[role] = container["command"]
        pair.args[role] = container["args"]
        pair.env[role] = {
            variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container.get("env", [])
        }
        pair.ports[role] = f"{service['metadata']['name']}:{port['port']}"
    return pair


def option(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


@pytest.mark.parametrize("read", [pair_of_compose, pair_of_kubernetes])
def test_a_disaggregated_pair_fits_together(read: Callable[[], PairFile]) -> None:
    pair = read()
    assert pair.args.keys() == {"prefill", "decode", "proxy"}
    # The prefill server runs the image's default program, and the decode server runs stock vLLM.
    assert pair.entrypoints.keys() == {"decode", "proxy"}
    load_config(json.loads(option(pair.args["prefill"], "--additional-config")))
    assert pair.entrypoints["decode"] == ["vllm", "serve"]
    assert pair.env["decode"]["VLLM_PLUGINS"] == "none"
    assert "--additional-config" not in pair.args["decode"]
    # The block size and served name must match; the handshake would refuse another backend name.
    for name in ("--block-size", "--served-model-name"):
        assert option(pair.args["prefill"], name) == option(pair.args["decode"], name), name
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        transfer = json.loads(option(pair.args[role], "--kv-transfer-config"))
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", kv_role)
        assert transfer["kv_connector_extra_config"] == {"enforce_handshake_compat": False}
        # vLLM's default, localhost, would be a different machine for the other server.
        own_address = {"fieldRef": {"fieldPath": "status.podIP"}}
        assert pair.env[role]["VLLM_NIXL_SIDE_CHANNEL_HOST"] in (role, own_address)
    # The proxy is in the image, and connects to both servers by their services.
    interpreter, program = pair.entrypoints["proxy"]
    copied = re.findall(r"deploy/(\S+\.\w+)", (DEPLOY / "Dockerfile").read_text())
    assert (interpreter, Path(program).parent) == ("python3", Path("/opt/sparse-prefill"))
    assert Path(program).name in copied
    for role in ("prefill", "decode"):
        assert option(pair.args["proxy"], f"--{role}") == f"http://{pair.ports[role]}"


def test_only_the_proxy_of_a_pair_is_published() -> None:
    assert [role for role, service in PAIR.items() if service.get("ports")] == ["proxy"]
    assert all(port.startswith("127.0.0.1:") for port in PAIR["proxy"]["ports"])
    cards = [
        PAIR[role]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for role in ("prefill", "decode")
    ]
    assert cards == [["0"], ["1"]]
    policies = [
        document
        for document in yaml.safe_load_all((KUBERNETES / "disaggregated.yaml").read_text())
        if document["kind"] == "NetworkPolicy"
    ]
    by_name = {policy["metadata"]["name"]: policy["spec"] for policy in policies}
    clients = by_name["sparse-prefill-pair-clients"]
    assert clients["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "sparse-prefill-proxy"}
    assert {"podSelector": {}} not in [
        peer for rule in by_name["sparse-prefill-pair"]["ingress"] for peer in rule["from"]
    ]


def test_production_stack_serves_this_backend() -> None:
    spec = yaml.safe_load((KUBERNETES / "production-stack.yaml").read_text())["servingEngineSpec"]
    (model,) = spec["modelSpec"]
    args = model["vllmConfig"]["extraArgs"]
    assert args[args.index("--attention-backend") + 1] == "sparse-prefill"
    load_config(json.loads(args[args.index("--additional-config") + 1]))
    assert model["requestGPU"] == model["vllmConfig"]["tensorParallelSize"]
    assert not model["lmcacheConfig"]["enabled"]
    assert spec["serviceMonitor"]["enabled"]


def test_workflow_actions_are_pinned_by_commit() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for action in re.findall(r"uses: ([^\s]+)", path.read_text()):
            assert action.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), (path, action)
