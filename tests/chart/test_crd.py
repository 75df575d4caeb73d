"""The CRD: updated by an upgrade, kept by an uninstall, and otherwise the file as it is."""

from __future__ import annotations

import yaml

from tests.chart.chart import CHART, of_kind, render

FILE = CHART / "files" / "trainingjob-crd.yaml"


def test_it_is_the_file_and_is_kept() -> None:
    (rendered,) = of_kind(render(), "CustomResourceDefinition").values()
    written = yaml.safe_load(FILE.read_text())
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert rendered == written


def test_it_is_a_template_so_that_an_upgrade_updates_it() -> None:
    assert not (CHART / "crds").exists()


def test_it_can_be_left_to_somebody_else() -> None:
    assert not of_kind(render({"crd.install": False}), "CustomResourceDefinition")


def test_its_names() -> None:
    spec = yaml.safe_load(FILE.read_text())["spec"]
    assert (spec["group"], spec["scope"], spec["names"]["kind"], spec["names"]["plural"]) == (
        "orchestrator.dev",
        "Namespaced",
        "TrainingJob",
        "trainingjobs",
    )
    (version,) = spec["versions"]
    assert version["name"] == "v1alpha1"
    assert set(version["subresources"]) == {"status", "scale"}
