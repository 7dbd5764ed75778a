"""The manifests in scripts/kubernetes/ are what Kubernetes, Volcano, the Ascend Operator and the launcher take.

Schemas say which fields there are and of what type; ``problems`` says the rest, that one field must fit another. That
it sees what is wrong is tried with manifests in which one field was altered.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from mindnlp_dp import cli
from mindnlp_dp.launch.engines import LaunchError, NotMetError
from mindnlp_dp.text_classification.config import FinetuneConfig, InputError, parse_config

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "scripts" / "kubernetes"
SCHEMAS = Path(__file__).parent / "kubernetes_schemas"
NAMES = ["indexed_job", "volcano", "ascend_job"]
# The first version in which podFailurePolicy is stable.
KUBERNETES = "1.31"
# Fields whose values Kubernetes checks and its schema does not, wherever they occur.
VALUES = {
    "accessModes": {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"},
    "clusterIP": {"None"},
    "completionMode": {"Indexed"},
    # Of a pod: Always is the default, and no choice for one that comes to an end.
    "restartPolicy": {"Never"},
    "operator": {"In", "NotIn"},
    "medium": {"Memory"},
    "topologyKey": {"kubernetes.io/hostname"},
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
}
NPU = "huawei.com/Ascend910"
UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "": 1}


@functools.lru_cache
def text_of(name):
    return json.dumps(list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text(encoding="utf-8"))))


def load(name):
    """The documents of a manifest by kind; nothing is shared between them, as an anchor in YAML would."""
    documents = json.loads(text_of(name))
    assert len({document["kind"] for document in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


# --- what is wrong with a manifest ---


def problems(documents):
    """Sentences; none for a manifest that is right."""
    try:
        # A manifest that fits its schemas has fields of the types that the rest expects.
        return [*against_schemas(documents), *values(list(documents.values()))] or [*one_with_another(documents)]
    except KeyError as error:
        return [f"there is no {error}"]


def one_with_another(documents):
    job = documents.get("AscendJob") or documents["Job"]
    kinds = {"batch/v1": indexed, "batch.volcano.sh/v1alpha1": volcano, "mindxdl.gitee.com/v1": ascend}
    yield from kinds[job["apiVersion"]](documents, job)
    yield from volumes_that_stay(documents, job)


def against_schemas(documents):
    for document in documents.values():
        schema = {"batch.volcano.sh/v1alpha1": "volcano_job", "mindxdl.gitee.com/v1": "ascend_job"}
        if document["apiVersion"] not in schema:
            yield from against_kubernetes(document)
            continue
        rules = json.loads((SCHEMAS / f"{schema[document['apiVersion']]}.json").read_text(encoding="utf-8"))
        wrong = [error.message for error in jsonschema.Draft202012Validator(rules).iter_errors(document)]
        yield from wrong
        for template in [] if wrong else templates(document):
            metadata = {"name": "pod", **template.get("metadata", {})}
            yield from against_kubernetes(
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            )


def against_kubernetes(document):
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        yield f"{document['kind']}: {error}"


def values(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key in VALUES and not VALUES[key].issuperset(value if isinstance(value, list) else [value]):
                yield f"{key}: {value!r} is none of {sorted(VALUES[key])}"
            yield from values(value)
    elif isinstance(node, list):
        for value in node:
            yield from values(value)


def templates(job):
    spec = job["spec"]
    if "replicaSpecs" in spec:
        return [spec["replicaSpecs"][role]["template"] for role in ("Scheduler", "Worker")]
    return [task["template"] for task in spec["tasks"]] if "tasks" in spec else [spec["template"]]


def indexed(documents, job):
    spec, name = job["spec"], job["metadata"]["name"]
    service = documents["Service"]
    if spec["completions"] != spec["parallelism"]:
        yield "completions must be parallelism: hosts wait for each other"
    if spec["completionMode"] != "Indexed" or spec["backoffLimit"] < 1:
        yield "pods have numbers, and may fail"
    yield from failures(spec["podFailurePolicy"]["rules"], spec["template"]["spec"]["containers"])
    subdomain = spec["template"]["spec"]["subdomain"]
    if subdomain != service["metadata"]["name"]:
        yield f"subdomain {subdomain} is not the Service's name"
    if service["spec"]["clusterIP"] != "None" or not service["spec"]["publishNotReadyAddresses"]:
        yield "names of pods need a headless Service, those of pods that are not ready publishNotReadyAddresses"
    # The job controller gives its pods this label.
    labels = {"job-name": name, **spec["template"].get("metadata", {}).get("labels", {})}
    if not fits(service["spec"]["selector"], labels):
        yield "the Service does not select the job's pods"
    head = f"{name}-0.{subdomain}"
    yield from pod(spec["template"]["spec"], labels, spec["completions"], head, {"JOB_COMPLETION_INDEX"})
    if spec["template"]["spec"]["restartPolicy"] != "Never":
        yield "podFailurePolicy needs pods that are not restarted in their place"
    [container] = spec["template"]["spec"]["containers"]
    ports = [(port["name"], port["containerPort"]) for port in container["ports"]]
    if ports != [(port["name"], port.get("targetPort", port["port"])) for port in service["spec"]["ports"]]:
        yield "the Service's ports are not the container's"


def failures(rules, containers):
    if [rule["action"] for rule in rules] != ["Ignore", "FailJob", "Ignore"]:
        yield "disruptions are ignored, then some exit codes fail the job, and others are ignored"
    for rule in rules:
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "a rule is about exit codes or about conditions"
        code = LaunchError.exit_code if rule["action"] == "FailJob" else NotMetError.exit_code
        codes = rule.get("onExitCodes", {"operator": "In", "values": [code]})
        if codes["values"] != [code] or codes["operator"] != "In":
            yield "exit code 2 is wrong usage, 75 a first host that is gone; others may go well the next time"
        if rule.get("onExitCodes", {"containerName": "ranks"})["containerName"] not in [c["name"] for c in containers]:
            yield "a rule is about another container"
        conditions = rule.get("onPodConditions", [{"type": "DisruptionTarget", "status": "True"}])
        if conditions != [{"type": "DisruptionTarget", "status": "True"}]:
            yield "the condition of a disruption is DisruptionTarget"


def volcano(documents, job):
    spec, name = job["spec"], job["metadata"]["name"]
    [task] = spec["tasks"]
    if spec["minAvailable"] != task["replicas"]:
        yield "minAvailable must be replicas: hosts wait for each other"
    if spec["plugins"]["svc"] != ["--publish-not-ready-addresses=true"]:
        yield "the first host has to be found before it is ready"
    if spec["policies"][0] != {"exitCode": 2, "action": "AbortJob"}:
        yield "wrong usage stays wrong: before the other policies, for the first that fits is taken"
    if {"event": "PodEvicted", "action": "RestartJob"} not in spec["policies"]:
        yield "a pod that was evicted must come back"
    if spec["schedulerName"] != "volcano":
        yield "who starts all or none is Volcano's scheduler"
    labels = {"volcano.sh/job-name": name, **task["template"].get("metadata", {}).get("labels", {})}
    # What the plug-in svc calls a pod.
    head = f"{name}-{task['name']}-0.{name}"
    yield from pod(task["template"]["spec"], labels, task["replicas"], head, {"VC_TASK_INDEX"})
    if task["template"]["spec"]["restartPolicy"] != "Never":
        yield "policies are about pods that are not restarted in their place"


def ascend(documents, job):
    spec, roles = job["spec"], job["spec"]["replicaSpecs"]
    hosts = sum(role["replicas"] for role in roles.values())
    if spec["runPolicy"]["schedulingPolicy"]["minAvailable"] != hosts:
        yield f"minAvailable must be the replicas of Scheduler and Worker, {hosts}"
    if roles["Scheduler"]["template"] != roles["Worker"]["template"]:
        yield "every host runs the same"
    if "fault-retry-times" in job["metadata"]["labels"] and "backoffLimit" not in spec["runPolicy"]:
        yield "retries need backoffLimit as well"
    for role in roles.values():
        template = role["template"]
        labels = {"job-name": job["metadata"]["name"], **template.get("metadata", {}).get("labels", {})}
        if labels.get("ring-controller.atlas") != job["metadata"]["labels"]["ring-controller.atlas"]:
            yield "a pod's generation of NPUs is the job's"
        yield from pod(template["spec"], labels, hosts, "$(MS_SCHED_HOST)", {"MS_SCHED_HOST", "MS_NODE_RANK"})
        [container] = template["spec"]["containers"]
        # The port of the operator's Service, without which no worker reaches the first host.
        if [port["name"] for port in container["ports"]] != ["ascendjob-port"]:
            yield "the operator looks for a port that is named ascendjob-port"
        if container["args"][container["args"].index("--backend") + 1] != "mindspore":
            yield "NPUs need --backend mindspore"
        if NPU not in container["resources"]["requests"]:
            yield f"there is no {NPU}"
        visible = [one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"]
                   if one["name"] == "ASCEND_VISIBLE_DEVICES"]  # fmt: skip
        if visible != [f"metadata.annotations['{NPU}']"]:
            yield "the pod's annotation says which NPUs are its"


def fits(selector, labels):
    # An empty one fits everybody.
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def pod(spec, labels, hosts, head, variables):
    """Of one host: its container, what it mounts and runs, and that it is alone on its machine."""
    [container] = spec["containers"]
    if spec["terminationGracePeriodSeconds"] < 60:
        yield "ranks need a minute to end"
    if not (container["image"] and spec["shareProcessNamespace"]):
        yield "somebody must take in orphans, and run something"
    terms = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    if not any(fits(term["labelSelector"]["matchLabels"], labels) for term in terms):
        yield "podAntiAffinity is not about the job's own pods"
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    if mounted.keys() != volumes.keys():
        yield f"mounts {sorted(mounted)} are not the volumes {sorted(volumes)}"
        return
    paths = {path: volumes[name] for name, path in mounted.items()}
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    if requests != limits:
        yield "requests must be limits"
    memory = paths.get("/dev/shm", {}).get("emptyDir", {})
    if memory.get("medium") != "Memory" or not 2**26 < size(memory["sizeLimit"]) < size(limits["memory"]):
        yield "/dev/shm must be memory, more than 64 MiB and less than the pod has"
    yield from environment(container, variables)
    yield from command(container, hosts, head, paths)


def size(text):
    number, unit = re.fullmatch(r"(\d+)(\w*)", text).groups()
    return int(number) * UNITS[unit]


def environment(container, variables):
    env = {one["name"]: one for one in container["env"]}
    if len(env) != len(container["env"]):
        yield "a variable is set twice"
    if not env["MINDNLP_DP_RDZV_TOKEN"]["valueFrom"]["secretKeyRef"]["name"]:
        yield "the token is a Secret's"
    if env["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] != "metadata.name":
        yield "POD_NAME is the pod's name"
    for one in env.values():
        if ("value" in one) == ("valueFrom" in one):
            yield f"{one['name']} has a value, or where it comes from"
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    if used - env.keys() - variables:
        yield f"nobody sets {used - env.keys() - variables}"
    npus = NPU in container["resources"]["requests"]
    if env.get("DEVICE_TARGET", {}).get("value") != ("Ascend" if npus else "CPU"):
        yield "DEVICE_TARGET is Ascend where there are NPUs, and CPU else"


def command(container, hosts, head, paths):
    args = container["args"]
    if container["command"] != ["mindnlp-dp"] or args[0] != "run":
        yield "the command is mindnlp-dp run"
        return
    try:
        parsed = cli._parser().parse_args([arg.replace("$(MS_SCHED_HOST)", "10.0.0.1") for arg in args])
    except SystemExit:
        yield f"mindnlp-dp does not take {' '.join(args)}"
        return
    script = args.index(parsed.script)
    flags = dict(zip(args[1:script:2], args[2:script:2]))
    if flags["--nnodes"].split(":")[-1] != str(hosts):
        yield f"--nnodes {flags['--nnodes']} for {hosts} pods"
    ports = [port["containerPort"] for port in container["ports"]]
    if [flags["--rdzv-endpoint"]] != [f"{head}:{port}" for port in ports]:
        yield f"the endpoint {flags['--rdzv-endpoint']} is not {head} with a port of {ports}"
    ranks = int(flags["--nproc-per-node"])
    resources = container["resources"]["requests"]
    if resources.get(NPU, ranks) != ranks or int(resources["cpu"]) < ranks:
        yield f"{ranks} ranks for {resources}"
    yield from trained(parsed.script, args[script + 1 :], hosts * ranks)
    for flag, path in [("--log-dir", flags["--log-dir"]), ("--output-dir", args[args.index("--output-dir") + 1])]:
        if not any(path.startswith(f"{at}/") and "persistentVolumeClaim" in of for at, of in paths.items()):
            yield f"{flag} {path} goes with the pod"
    # Pods write side by side to one volume.
    if "$(POD_NAME)" not in flags["--log-dir"]:
        yield "each pod needs a folder of its own for logs"


def trained(script, args, ranks):
    try:
        config = parse_config(FinetuneConfig, args)
    except (SystemExit, InputError):
        yield f"{script} does not take {' '.join(args)}"
        return
    if not (ROOT / script).is_file():
        yield f"there is no {script}"
    if not (config.resume and config.save_steps):
        yield "a pod that comes back must find a checkpoint"
    if config.global_batch_size % ranks:
        yield f"{config.global_batch_size} samples are not divisible by {ranks} ranks"


def volumes_that_stay(documents, job):
    claims = {volume["persistentVolumeClaim"]["claimName"] for template in templates(job)
              for volume in template["spec"]["volumes"] if "persistentVolumeClaim" in volume}  # fmt: skip
    claim = documents["PersistentVolumeClaim"]
    if claims != {claim["metadata"]["name"]}:
        yield f"volumes claim {sorted(claims)}, and the claim is {claim['metadata']['name']}"
    if size(claim["spec"]["resources"]["requests"]["storage"]) < 2**30 or (
        claim["spec"]["accessModes"] != ["ReadWriteMany"]
    ):  # fmt: skip
        yield "pods on several hosts write to one volume"


# --- the manifests ---


@pytest.fixture(autouse=True)
def _in_the_working_directory_of_the_image(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", NAMES)
def test_manifest(name):
    assert problems(load(name)) == []


@pytest.mark.core
def test_every_manifest_is_checked():
    assert sorted(path.stem for path in MANIFESTS.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_head_names_its_commands_and_brings_no_secret(name):
    head = (MANIFESTS / f"{name}.yaml").read_text(encoding="utf-8").split("apiVersion")[0]
    assert f"kubectl apply -f scripts/kubernetes/{name}.yaml" in head
    assert "not run on a cluster" in head
    [made, key] = re.search(r"kubectl create secret generic (\S+) --from-literal=(\w+)=", head).groups()
    documents = load(name)
    assert "Secret" not in documents
    text = json.dumps(documents)
    references = re.findall(r'"secretKeyRef": ({.*?})', text)
    assert references
    assert all(json.loads(reference) == {"name": made, "key": key} for reference in references)


# --- a manifest with one thing wrong ---

GONE = object()
POD = {
    "indexed_job": "Job.spec.template.spec",
    "volcano": "Job.spec.tasks.0.template.spec",
    "ascend_job": "AscendJob.spec.replicaSpecs.Worker.template.spec",
}
IN_ANY = [
    ("PersistentVolumeClaim.metadata.name", "other"),
    ("PersistentVolumeClaim.spec.accessModes", ["ReadWriteOnce"]),
    ("PersistentVolumeClaim.spec.accessModes", ["ReadWriteAll"]),
    ("PersistentVolumeClaim.spec.resources.request", {}),
    ("POD.container", []),
    ("POD.restartPolicy", "Never again"),
    ("POD.terminationGracePeriodSeconds", 5),
    ("POD.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution.0.topologyKey", "hostname"),
    ("POD.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution.0.labelSelector.matchLabels",
     {"app": "other"}),
    ("POD.containers.0.image", 3),
    ("POD.containers.0.ports.0.containerPort", "29400"),
    ("POD.containers.0.ports.0.containerPort", 29401),
    ("POD.containers.0.resources.limits.memory", "1Gi"),
    ("POD.containers.0.resources.requests.memory", "1Gi"),
    ("POD.containers.0.volumeMounts.0.name", "elsewhere"),
    ("POD.containers.0.volumeMounts.0.mountPath", "/elsewhere"),
    ("POD.containers.0.volumeMounts.1.mountPath", "/dev/shn"),
    ("POD.volumes.1.emptyDir.medium", "Disk"),
    ("POD.volumes.1.emptyDir.medium", GONE),
    ("POD.volumes.1.emptyDir.sizeLimit", "64Mi"),
    ("POD.volumes.0.persistentVolumeClaim.claimName", "other"),
    ("POD.volumes.0.persistentVolumeClaim.claim", "dp-job"),
    ("ENV.MINDNLP_DP_RDZV_TOKEN.valueFrom", GONE),
    ("ENV.MINDNLP_DP_RDZV_TOKEN.name", "RDZV_TOKEN"),
    ("ENV.POD_NAME.name", "NAME_OF_POD"),
    ("ENV.DEVICE_TARGET.value", "GPU"),
    ("POD.containers.0.command", ["mindnlp_dp"]),
    ("FLAG.run", "start"),
    ("FLAG.--nnodes", "3"),
    ("FLAG.--nnodes", "2:3"),
    ("FLAG.--nnodes", "two"),
    ("FLAG.--nproc-per-node", "0"),
    ("FLAG.--nproc-per-node", "3"),
    ("FLAG.--rdzv-endpoint", "dp-job-1.dp-job:29400"),
    ("FLAG.--backend", "gloo"),
    ("FLAG.--max-restarts", "often"),
    ("FLAG.--log-dir", "/job/logs"),
    ("FLAG.--log-dir", "logs/$(POD_NAME)"),
    ("FLAG.--output-dir", "outputs"),
    ("FLAG.--config", "configs/none.yaml"),
    ("FLAG.--save-steps", "0"),
]  # fmt: skip
WRONG = {
    "indexed_job": [
        ("Service.spec.clusterIP", GONE),
        ("Service.spec.clusterIP", "10.0.0.1"),
        ("Service.spec.publishNotReadyAddresses", GONE),
        ("Service.spec.selector", {"job-name": "other"}),
        ("Service.spec.ports.0.port", 29401),
        ("Service.spec.ports.0.name", "other"),
        ("Service.spec.ports.0.prot", "TCP"),
        ("Service.metadata.name", "other"),
        ("Job.apiVersion", "batch/v2"),
        ("Job.metadata.name", "other"),
        ("Job.spec.completionMode", "Index"),
        ("Job.spec.completionMode", GONE),
        ("Job.spec.completions", 3),
        ("Job.spec.parallelism", 1),
        ("Job.spec.backoffLimit", GONE),
        ("Job.spec.backoffLimits", 3),
        ("Job.spec.podFailurePolicy", GONE),
        ("Job.spec.podFailurePolicy.rules.0.action", "Fail"),
        ("Job.spec.podFailurePolicy.rules.0.onPodConditions.0.type", "Disruption"),
        ("Job.spec.podFailurePolicy.rules.1.onExitCodes.operator", "Equals"),
        ("Job.spec.podFailurePolicy.rules.1.onExitCodes.values", [1]),
        ("Job.spec.podFailurePolicy.rules.1.onExitCodes.containerName", "other"),
        ("Job.spec.podFailurePolicy.rules.1.onExitCodes", GONE),
        ("POD.subdomain", GONE),
        ("POD.restartPolicy", "OnFailure"),
    ],
    "volcano": [
        ("Job.apiVersion", "batch.volcano.sh/v1"),
        ("Job.spec.schedulerName", "default-scheduler"),
        ("Job.spec.minAvailable", 1),
        ("Job.spec.minimum", 1),
        ("Job.spec.plugins.env", GONE),
        ("Job.spec.plugins.svc", []),
        ("Job.spec.plugins.svc", ["--publish=true"]),
        ("Job.spec.policies.0.exitCode", 0),
        ("Job.spec.policies.0.event", "PodFailed"),
        ("Job.spec.policies.0.action", "FailJob"),
        ("Job.spec.policies.1.event", "Evicted"),
        ("Job.spec.policies.1.action", "CompleteJob"),
        ("Job.spec.tasks.0.name", "Host"),
        ("Job.spec.tasks.0.name", "other"),
        ("Job.spec.tasks.0.replicas", 3),
        ("Job.spec.tasks.0.template", GONE),
    ],
    "ascend_job": [
        ("AscendJob.apiVersion", "mindxdl.gitee.com/v2"),
        ("AscendJob.metadata.labels.framework", "pytorch"),
        ("AscendJob.metadata.labels.framework", GONE),
        ("AscendJob.metadata.labels", GONE),
        ("AscendJob.metadata.labels.fault-scheduling", "gracefully"),
        ("AscendJob.metadata.labels.ring-controller.atlas", "ascend-910"),
        ("AscendJob.spec.successPolicy", "AllPods"),
        ("AscendJob.spec.runPolicy.backoffLimit", GONE),
        ("AscendJob.spec.runPolicy.schedulingPolicy.minAvailable", 1),
        ("AscendJob.spec.replicaSpecs.Scheduler", GONE),
        ("AscendJob.spec.replicaSpecs.Scheduler.replicas", 2),
        ("AscendJob.spec.replicaSpecs.Master", {}),
        ("AscendJob.spec.replicaSpecs.Worker.replicas", 2),
        ("AscendJob.spec.replicaSpecs.Worker.restartPolicy", "Sometimes"),
        ("POD.containers.0.name", "ranks"),
        ("POD.containers.0.image", GONE),
        ("POD.containers.0.ports.0.name", "rendezvous"),
        ("POD.containers.0.resources.requests", {"cpu": "64", "memory": "256Gi"}),
        ("FLAG.--backend", "mpi"),
        ("FLAG.--rdzv-endpoint", "$(MS_SCHEDULER):29400"),
        ("ENV.ASCEND_VISIBLE_DEVICES.valueFrom.fieldRef.fieldPath", "metadata.annotations['npu']"),
    ],
}


def alter(documents, name, path, value):
    """Set, or delete, what is at a path of keys; in an AscendJob in the pods of both roles, which are the same."""
    place, _, rest = path.partition(".")
    if place in ("POD", "ENV", "FLAG"):
        for base in [POD[name], POD[name].replace("Worker", "Scheduler")][: 1 + (name == "ascend_job")]:
            pod_path = f"{base}.containers.0"
            container = find(documents, pod_path.split("."))
            if place == "POD":
                change(documents, [*base.split("."), *rest.split(".")], value)
            elif place == "ENV":
                variable, _, field = rest.partition(".")
                [one] = [one for one in container["env"] if one["name"] == variable]
                change(one, field.split("."), value)
            else:
                args = container["args"]
                args[args.index(rest) + rest.startswith("--")] = value
        return
    if path.endswith("ring-controller.atlas"):
        documents[place]["metadata"]["labels"]["ring-controller.atlas"] = value
        return
    change(documents, path.split("."), value)


def find(node, keys):
    return functools.reduce(lambda inner, key: inner[int(key) if isinstance(inner, list) else key], keys, node)


def change(node, keys, value):
    inner, last = find(node, keys[:-1]), keys[-1]
    if value is GONE:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = copy.deepcopy(value)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        pytest.param(name, path, value, id=f"{name}-{path}-{'gone' if value is GONE else value}")
        for name in NAMES
        for path, value in [*IN_ANY, *WRONG[name]]
    ],
)
def test_one_wrong_field_is_seen(name, path, value):
    documents = load(name)
    alter(documents, name, path, value)
    assert documents != load(name)
    assert problems(documents) != []


# What a manifest may be without: its ways are then others, or what was left out is the default.
OPTIONAL = """automountServiceAccountToken nodeSelector nodeSelector.* queue maxRetry
  labels.fault-scheduling labels.fault-retry-times tasks.0.*.ports.0.name""".split()


def fields(node, *path):
    """The paths to all fields within, as keys; not into the second of two roles that are the same."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(node, dict):
            yield (*path, key)
        if isinstance(value, (dict, list)) and (*path, key)[-2:] != ("Worker", "template"):
            yield from fields(value, *path, key)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_that_is_missing_is_seen(name):
    unseen = []
    for path in fields(load(name)):
        documents = load(name)
        change(documents, path, GONE)
        twin = ["Worker" if key == "Scheduler" else key for key in path]
        if "template" in path and twin != list(path):
            change(documents, twin, GONE)
        if not problems(documents):
            unseen.append(".".join(map(str, path)))
    assert [path for path in unseen if not any(fnmatch.fnmatch(path, f"*.{optional}") for optional in OPTIONAL)] == []


def test_a_host_that_runs_something_else_is_seen():
    documents = load("ascend_job")
    documents["AscendJob"]["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["nodeSelector"] = {"host-arch": "x"}
    assert problems(documents) == ["every host runs the same"]


def test_an_elastic_job_fits_as_many_pods_as_it_may_have():
    documents = load("indexed_job")
    alter(documents, "indexed_job", "FLAG.--nnodes", "1:2")
    assert problems(documents) == []
