"""Compares the manifests of this folder with KubeRay's schema: fields, types and required values.

    python -m tools.kuberay.check

The schema is that of KubeRay's custom resource definitions. The Go module proxy has the definitions in the module of
KubeRay's operator, which is pinned by version and digest and kept in `build/kuberay`. A field that the schema does not
have is an error, though Kubernetes would drop the field without a word. Rules that the schema states in CEL, and rules
of the operator's own code, are not checked.
"""

import hashlib
import io
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

VERSION = "v1.6.0"
SHA256 = "08bccad7be7e18eae8689d3759ee834882aff1e18e30bf9865ee097e61e8660e"
FOLDER = Path(__file__).resolve().parent
_MODULE = "github.com/ray-project/kuberay/ray-operator"
_DOWNLOADS = FOLDER.parents[1] / "build" / "kuberay"
_DEFINITIONS = {"RayCluster": "ray.io_rayclusters.yaml", "RayJob": "ray.io_rayjobs.yaml"}
_TIMEOUT_SECONDS = 60


class CheckError(Exception):
    """Error that keeps the check from running; the message is one line for the user."""


def main() -> int:
    """Checks all manifests, and prints a line for each manifest and each mistake.

    Returns:
      The exit status: 0, or 1 after a mistake or an error.
    """
    try:
        schemas = read_schemas(fetch_module())
    except CheckError as error:
        print(f"kuberay: {error}", file=sys.stderr)
        return 1
    status = 0
    for path in sorted(FOLDER.glob("*.yaml")):
        found = list(mistakes(path.read_text(), schemas))
        print(f"{path.name}: {'fits the schema' if not found else f'{len(found)} mistakes'}")
        for mistake in found:
            print(f"  {mistake}")
            status = 1
    return status


def fetch_module() -> bytes:
    """Returns the archive of the operator's module: the copy in `build/kuberay`, or a new download.

    Raises:
      CheckError: the download fails, or has another digest.
    """
    kept = _DOWNLOADS / f"{VERSION}.zip"
    if kept.exists() and _digest(kept.read_bytes()) == SHA256:
        return kept.read_bytes()
    url = f"https://proxy.golang.org/{_MODULE}/@v/{VERSION}.zip"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            archive = answer.read()
    except (urllib.error.URLError, TimeoutError) as error:
        raise CheckError(f"{url} cannot be read: {error}") from error
    if _digest(archive) != SHA256:
        raise CheckError(f"{url} has the SHA-256 digest {_digest(archive)}, not {SHA256}")
    _DOWNLOADS.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(archive)
    return archive


def read_schemas(archive: bytes) -> dict[str, Any]:
    """Reads JSON schemas from the archive, with unknown fields refused, by kind.

    KubeRay's definitions contain the schema of a volume claim's `spec`, which checks `PersistentVolumeClaim`.

    Raises:
      CheckError: the archive has no definition of a kind in the version v1.
    """
    schemas: dict[str, Any] = {}
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        for kind, file in _DEFINITIONS.items():
            try:
                definition = yaml.load(
                    files.read(f"{_MODULE}@{VERSION}/config/crd/bases/{file}"), Loader=yaml.CSafeLoader
                )
                (version,) = [own for own in definition["spec"]["versions"] if own["name"] == "v1"]
            except (KeyError, ValueError) as error:
                raise CheckError(f"KubeRay {VERSION} has no definition of {kind} in the version v1") from error
            schemas[kind] = closed(version["schema"]["openAPIV3Schema"])
    pod = schemas["RayCluster"]["properties"]["spec"]["properties"]["headGroupSpec"]["properties"]["template"]
    volume = pod["properties"]["spec"]["properties"]["volumes"]["items"]
    claim = volume["properties"]["ephemeral"]["properties"]["volumeClaimTemplate"]["properties"]["spec"]
    top = schemas["RayCluster"]["properties"]
    schemas["PersistentVolumeClaim"] = closed(
        {
            "type": "object",
            "required": ["spec"],
            "properties": {**{name: top[name] for name in ("apiVersion", "kind", "metadata")}, "spec": claim},
        }
    )
    return schemas


def closed(schema: Any) -> Any:
    """Returns an OpenAPI schema as a JSON schema that refuses unknown fields, and takes null where OpenAPI allows null.

    An object whose fields are listed takes no other field, unless the schema says so.
    """
    if isinstance(schema, list):
        return [closed(member) for member in schema]
    if not isinstance(schema, Mapping):
        return schema
    # Below `properties` the keys are names of fields, not words of the schema.
    result = {
        key: {name: closed(member) for name, member in value.items()} if key == "properties" else closed(value)
        for key, value in schema.items()
    }
    is_open = "additionalProperties" in result or result.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in result and not is_open:
        result["additionalProperties"] = False
    return {"anyOf": [result, {"type": "null"}]} if result.get("nullable") is True else result


def mistakes(manifest: str, schemas: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each place of a manifest that does not fit the schema of the manifest's kind.

    Args:
      manifest: one document of YAML.
      schemas: JSON schemas by kind.
    """
    try:
        document = yaml.safe_load(manifest)
    except yaml.YAMLError as error:
        yield f"no YAML: {error}"
        return
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(kind, str) or kind not in schemas:
        yield f"the kind {kind!r} is not known; the known kinds are {', '.join(schemas)}"
        return
    # OpenAPI 3.0 writes bounds as JSON Schema's draft 4 does.
    for error in jsonschema.Draft4Validator(schemas[kind]).iter_errors(document):
        yield f"{'.'.join(map(str, error.absolute_path)) or 'the manifest'}: {error.message}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
