"""Checks the manifests in scripts/kubernetes/ against Kubernetes, Volcano, the Ascend Operator and the launcher.

Schemas check the fields and their types; the other tests check that the fields agree with each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from mindnlp_dp.commands import main
from mindnlp_dp.finetuning.settings import parse_config
from mindnlp_dp.launch.errors import LaunchError, LeaderLostError
from mindnlp_dp.launch.processes.spawn import DEVICE_GRACE_SECONDS, GRACE_SECONDS
from mindnlp_dp.text_classification.classification_config import FinetuneConfig

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "scripts" / "kubernetes"
SCHEMAS = Path(__file__).parent / "kubernetes_schemas"
# This is the first version in which podFailurePolicy is stable.
KUBERNETES = "1.31"
NPU = "huawei.com/Ascend910"
UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "": 1}
# By manifest: the kind of its job, the path to its pod template, the name of the first host, and the variables that
# the controller sets.
JOBS = {
    "indexed_job": ("Job", [], "dp-job-0.dp-job", {"JOB_COMPLETION_INDEX"}),
    "volcano": ("Job", ["tasks", 0], "dp-job-host-0.dp-job", {"VC_TASK_INDEX"}),
    "ascend_job": ("AscendJob", ["replicaSpecs", "Worker"], "$(MS_SCHED_HOST)", {"MS_SCHED_HOST", "MS_NODE_RANK"}),
}
every_manifest = pytest.mark.parametrize("name", JOBS)


def load(name):
    """Return the documents of a manifest by kind."""
    documents = list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text(encoding="utf-8")))
    assert len({document["kind"] for document in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


def job_of(name):
    documents = load(name)
    return documents, documents[JOBS[name][0]]


def pods_of(name):
    """Return the metadata and the specification of a job's pods."""
    node = job_of(name)[1]["spec"]
    for key in JOBS[name][1]:
        node = node[key]
    return node["template"].get("metadata", {}), node["template"]["spec"]


def container_of(name):
    [container] = pods_of(name)[1]["containers"]
    return container


def hosts_of(name):
    spec = job_of(name)[1]["spec"]
    if name == "indexed_job":
        return spec["completions"]
    return (
        spec["tasks"][0]["replicas"] if name == "volcano" else sum(r["replicas"] for r in spec["replicaSpecs"].values())
    )


def size(text):
    number, unit = re.fullmatch(r"(\d+)(\w*)", text).groups()
    return int(number) * UNITS[unit]


def check_schemas(document):
    """Raise the ValidationError of one of the two libraries if the document does not fit its schema."""
    schema = {"batch.volcano.sh/v1alpha1": "volcano_job", "mindxdl.gitee.com/v1": "ascend_job"}.get(
        document["apiVersion"]
    )
    if schema is None:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    rules = json.loads((SCHEMAS / f"{schema}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(rules).validate(document)
    spec = document["spec"]
    for part in spec["tasks"] if schema == "volcano_job" else spec["replicaSpecs"].values():
        metadata = {"name": "pod", **part["template"].get("metadata", {})}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": part["template"]["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.core
def test_every_manifest_is_checked():
    assert sorted(path.stem for path in MANIFESTS.iterdir()) == sorted(JOBS)


@pytest.mark.core
@every_manifest
def test_every_manifest_matches_its_schemas(name):
    for document in load(name).values():
        check_schemas(document)


@every_manifest
def test_schemas_refuse_fields_of_another_name_or_type(name):
    for key, value in (("containers", "one"), ("container", [])):
        _, job = job_of(name)
        node = job["spec"]
        for step in JOBS[name][1]:
            node = node[step]
        node["template"]["spec"][key] = value
        with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
            check_schemas(job)


@every_manifest
def test_pods_run_a_command_that_the_launcher_accepts(name, monkeypatch):
    monkeypatch.chdir(ROOT)  # as in the image
    container, hosts = container_of(name), hosts_of(name)
    args, resources = container["args"], container["resources"]["requests"]
    # A pod's command replaces the entry point of scripts/containers/ascend.Dockerfile, which sets CANN's variables.
    assert container["command"] == [*(["with-cann"] if NPU in resources else []), "mindnlp-dp"]
    assert args[0] == "run"
    parsed = main._parser().parse_args([arg.replace("$(MS_SCHED_HOST)", "10.0.0.1") for arg in args])
    at = args.index(parsed.command[0])
    flags = dict(zip(args[1:at:2], args[2:at:2]))
    [port] = [port["containerPort"] for port in container["ports"]]
    assert flags["--nnodes"].split(":")[-1] == str(hosts)
    assert flags["--rdzv-endpoint"] == f"{JOBS[name][2]}:{port}"
    ranks = int(flags["--nproc-per-node"])
    assert resources.get(NPU, ranks) == ranks <= int(resources["cpu"])
    assert NPU not in resources or flags["--backend"] == "mindspore"
    config = parse_config(FinetuneConfig, args[at + 1 :])
    assert (ROOT / parsed.command[0]).is_file()
    # A pod that is restarted finds a checkpoint.
    assert config.resume
    assert config.save_steps > 0
    assert config.global_batch_size % (hosts * ranks) == 0
    volumes = {volume["name"]: volume for volume in pods_of(name)[1]["volumes"]}
    stay = [m["mountPath"] for m in container["volumeMounts"] if "persistentVolumeClaim" in volumes[m["name"]]]
    for path in (flags["--log-dir"], config.output_dir):
        assert any(path.startswith(f"{mounted}/") for mounted in stay), path
    # Pods write to one volume at the same time.
    assert "$(POD_NAME)" in flags["--log-dir"]


@every_manifest
def test_pods_have_the_memory_volumes_and_variables_of_the_ranks(name):
    documents, _ = job_of(name)
    metadata, spec = pods_of(name)
    container = container_of(name)
    requests = container["resources"]["requests"]
    grace_period = float(container["args"][container["args"].index("--grace-period") + 1])
    assert requests == container["resources"]["limits"]
    assert spec["terminationGracePeriodSeconds"] >= grace_period + 2 * DEVICE_GRACE_SECONDS + GRACE_SECONDS
    # The launcher restarts ranks, the controller restarts pods; an AscendJob sets this in another place.
    assert name == "ascend_job" or spec["restartPolicy"] == "Never"
    # Each pod has its own machine.
    labels = {"job-name": "dp-job", "volcano.sh/job-name": "dp-job", **metadata.get("labels", {})}
    [term] = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert term["topologyKey"] == "kubernetes.io/hostname"
    # The pod needs memory that ranks share, and a volume that persists.
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    paths = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in container["volumeMounts"]}
    assert not volumes
    memory = paths["/dev/shm"]["emptyDir"]
    assert memory["medium"] == "Memory"
    assert 2**26 < size(memory["sizeLimit"]) < size(requests["memory"])
    assert paths["/etc/mindnlp_dp"]["secret"]["secretName"] == "dp-job-token"
    claim = documents["PersistentVolumeClaim"]
    assert [v["persistentVolumeClaim"]["claimName"] for v in paths.values() if "persistentVolumeClaim" in v] == [
        claim["metadata"]["name"]
    ]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    # Every variable is set once, and every variable in an argument exists.
    env = {one["name"]: one for one in container["env"]}
    assert len(env) == len(container["env"])
    assert env["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert env["DEVICE_TARGET"]["value"] == ("Ascend" if NPU in requests else "CPU")
    assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= {*env, *JOBS[name][3]}


@every_manifest
def test_manifests_name_their_commands_and_contain_no_secret(name):
    head = (MANIFESTS / f"{name}.yaml").read_text(encoding="utf-8").split("apiVersion")[0]
    assert f"kubectl apply -f scripts/kubernetes/{name}.yaml" in head
    assert "not run on a cluster" in head
    [made, key] = re.search(r"kubectl create secret generic (\S+) --from-literal=(\w+)=", head).groups()
    assert "Secret" not in load(name)
    container, spec = container_of(name), pods_of(name)[1]
    # The environment is visible in many places, so it must not hold the token.
    assert "TOKEN" not in json.dumps(container["env"])
    [secret] = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "token"]
    args = container["args"]
    assert (secret, args[args.index("--rdzv-token-file") + 1]) == (made, f"{mount['mountPath']}/{key}")


@every_manifest
def test_pods_meet_the_restricted_pod_security_standard(name):
    """Check the requirements of the profile "restricted" of Kubernetes' Pod Security Standards."""
    documents, _ = job_of(name)
    _, spec = pods_of(name)
    security, container = spec["securityContext"], container_of(name)["securityContext"]
    assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert security["runAsUser"] == security["fsGroup"] > 0
    assert (container["allowPrivilegeEscalation"], container["capabilities"]) == (False, {"drop": ["ALL"]})
    assert spec["automountServiceAccountToken"] is False
    if name == "volcano":
        # Volcano's svc plug-in creates its own policy.
        assert "NetworkPolicy" not in documents
        return
    policy = documents["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    pods = {"podSelector": policy["podSelector"]}
    assert policy["ingress"] == [{"from": [pods]}]
    term = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert term["labelSelector"] == policy["podSelector"]


def test_an_indexed_job_waits_for_all_hosts_and_its_service_finds_them():
    documents, job = job_of("indexed_job")
    spec, service = job["spec"], documents["Service"]
    assert spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimit"] >= 1
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    # Pod names need a headless Service; names of pods that are not ready yet need the second field.
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert [port["port"] for port in service["spec"]["ports"]] == [
        port["containerPort"] for port in container_of("indexed_job")["ports"]
    ]


def rules():
    return job_of("indexed_job")[1]["spec"]["podFailurePolicy"]["rules"]


def action_for(exit_code, conditions=()):
    """Return what Kubernetes does with a failed pod: the action of the first rule that matches, or "Count"."""
    for rule in rules():
        codes = rule.get("onExitCodes", {"operator": "In", "containerName": "ranks", "values": []})
        assert (codes["operator"], codes["containerName"]) == ("In", container_of("indexed_job")["name"])
        wanted = {(one["type"], one["status"]) for one in rule.get("onPodConditions", ())}
        if exit_code in codes["values"] or wanted & set(conditions):
            return rule["action"]
    return "Count"


def end_of_job(*pods):
    """Replace the pods, each of which ends with an exit code and conditions, until the job has failed.

    Returns the reason in the job's status, and how often all pods were started.
    """
    limit, failed = job_of("indexed_job")[1]["spec"]["backoffLimit"], 0
    actions = [action_for(*pod) for pod in pods]
    for starts in range(1, 1000):
        if "FailJob" in actions:
            return "PodFailurePolicy", starts
        failed += actions.count("Count")
        if failed > limit:
            return "BackoffLimitExceeded", starts
    return "DeadlineExceeded", None


LOST, DISRUPTED = LeaderLostError.exit_code, [("DisruptionTarget", "True")]


@pytest.mark.core
@pytest.mark.parametrize(
    ("first", "other", "end"),
    [
        pytest.param((2,), (2,), ("PodFailurePolicy", 1), id="wrong usage"),
        pytest.param((75,), (75,), ("BackoffLimitExceeded", 4), id="log folders cannot be written"),
        pytest.param((1,), (1,), ("BackoffLimitExceeded", 4), id="a rank fails"),
        pytest.param((75,), (LOST,), ("BackoffLimitExceeded", 7), id="the first host's port is in use"),
        pytest.param((137,), (LOST,), ("BackoffLimitExceeded", 7), id="the first host has too little memory"),
        pytest.param((143, DISRUPTED), (143,), ("BackoffLimitExceeded", 7), id="the first host is drained"),
        pytest.param((137, DISRUPTED), (LOST,), ("DeadlineExceeded", None), id="the first host is lost"),
        pytest.param((LOST,), (LOST,), ("DeadlineExceeded", None), id="a script exits with the code of a lost host"),
    ],
)
def test_an_indexed_job_ends_after_any_failure_of_its_pods(first, other, end):
    """Replay what Kubernetes' documentation says of podFailurePolicy and backoffLimit, with pods that always fail."""
    assert end_of_job(first, other) == end
    # The end of a job whose failures are not counted.
    assert job_of("indexed_job")[1]["spec"]["activeDeadlineSeconds"] > 0


def test_the_exit_code_of_a_lost_host_has_no_conventional_meaning():
    codes = [rule["onExitCodes"]["values"] for rule in rules() if "onExitCodes" in rule]
    assert codes == [[LaunchError.exit_code], [LOST]]
    # pytest; sysexits.h; shells, timeout, xargs and signals.
    assert LOST not in {*range(6), *range(64, 79), *range(120, 256)}


PROGRAM = """
from mindnlp_dp.launch import membership
from mindnlp_dp.launch.rendezvous import client
client.REJOIN_SECONDS, client._SILENT_SECONDS, membership._SILENT_SECONDS = 1.0, 0.0, 2.0
from mindnlp_dp.commands.main import main
raise SystemExit(main())
"""


@contextlib.contextmanager
def launch(folder, *flags, script=""):
    """Start the launcher of a host, which tries for a second to reach a first host that is lost; end it at the end."""
    (folder / "script.py").write_text(script)
    # Under MPI, a machine cannot be two hosts.
    command = [sys.executable, "-c", PROGRAM, "run", "--backend", "mindspore", "--nproc", "1", *flags, "script.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MINDNLP_DP_RDZV_TOKEN": "0" * 64, "DEVICE_TARGET": "CPU"}
    with subprocess.Popen(
        list(map(str, command)), cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def free_port():
    """Return a port below those that a client's end of a connection gets, which might connect to itself."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def test_a_host_that_loses_the_first_host_ends_with_its_own_exit_code(tmp_path):
    """The first host, which waits for a third one, is killed."""
    flags = ("--nnodes", 3, "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    with launch(tmp_path, *flags, "--node-rank", 1, "--log-dir", "other") as other:
        assert any("waiting for the endpoint" in line for line in other.stdout)
        with launch(tmp_path, *flags, "--node-rank", 0) as first:
            assert "2 of 3 hosts have joined" in next(line for line in first.stdout if "have joined" in line)
            first.kill()
        said, _ = other.communicate(timeout=60)
    assert (other.returncode, "the job is over for this host" in said) == (LOST, True), said


@pytest.mark.parametrize(
    ("flags", "script", "code"),
    [
        (["--log-dir", "script.py/logs"], "", 75),
        (["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "USED"], "", 75),
        # The time to join is that to join again.
        (["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "FREE", "--rdzv-conf", "join_timeout=1"], "", 75),
        ([], "import sys\nsys.exit(75)\n", 75),
        (["--nnodes", "0"], "", 2),
    ],
    ids=["log folder not writable", "port in use", "first host unreachable", "exit code of the script", "wrong usage"],
)
def test_launcher_exit_codes_fail_the_job_or_count_as_retries(tmp_path, flags, script, code):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        endpoints = {"USED": f"127.0.0.1:{used.getsockname()[1]}", "FREE": f"127.0.0.1:{free_port()}"}
        with launch(tmp_path, *[endpoints.get(flag, flag) for flag in flags], script=script) as job:
            said, _ = job.communicate(timeout=60)
    assert job.returncode == code, said
    assert action_for(code) == ("FailJob" if code == LaunchError.exit_code else "Count")


def test_volcano_starts_all_hosts_or_none():
    spec = job_of("volcano")[1]["spec"]
    assert spec["schedulerName"] == "volcano"
    assert spec["minAvailable"] == hosts_of("volcano")
    # The first host must be found before it is ready.
    assert spec["plugins"]["svc"] == ["--publish-not-ready-addresses=true"]
    # A restart cannot repair wrong usage. This policy comes first, because the first match is applied.
    assert spec["policies"][0] == {"exitCode": LaunchError.exit_code, "action": "AbortJob"}
    assert {"event": "PodEvicted", "action": "RestartJob"} in spec["policies"]


def test_the_ascend_operator_finds_its_ports_labels_and_npus():
    _, job = job_of("ascend_job")
    spec, roles, labels = job["spec"], job["spec"]["replicaSpecs"], job["metadata"]["labels"]
    assert roles["Scheduler"]["template"] == roles["Worker"]["template"]
    assert spec["runPolicy"]["schedulingPolicy"]["minAvailable"] == hosts_of("ascend_job")
    # Retries need both settings.
    assert ("fault-retry-times" in labels) == ("backoffLimit" in spec["runPolicy"])
    metadata, _ = pods_of("ascend_job")
    assert metadata["labels"]["ring-controller.atlas"] == labels["ring-controller.atlas"]
    container = container_of("ascend_job")
    assert [port["name"] for port in container["ports"]] == ["ascendjob-port"]
    [visible] = [one["valueFrom"] for one in container["env"] if one["name"] == "ASCEND_VISIBLE_DEVICES"]
    assert visible == {"fieldRef": {"fieldPath": f"metadata.annotations['{NPU}']"}}
