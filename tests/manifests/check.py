"""Reads manifests, validates each strictly against the schema of Kubernetes, and prints them as JSON."""

import json
import sys

import kubernetes_validate
import yaml

manifests = [it for it in yaml.safe_load_all(sys.stdin) if it]
for manifest in manifests:
    # Custom resources are skipped: their schemas are only in the cluster.
    if manifest["apiVersion"].split("/")[0] not in ("monitoring.coreos.com", "kustomize.config.k8s.io"):
        kubernetes_validate.validate(manifest, "1.28", strict=True)
json.dump(manifests, sys.stdout)
