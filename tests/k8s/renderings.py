"""What is tested: base, every overlay, and the combinations that README.md shows."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

from k8s.make_base import BASE
from tests.k8s.manifests import ROOT, parse, render, render_with
from tests.k8s.rules.rendering import Rendering

OVERLAYS = sorted(path for path in (ROOT / "k8s" / "overlays").iterdir() if path.is_dir())
COMPONENTS = sorted(path for path in (ROOT / "k8s" / "components").iterdir() if path.is_dir())
LOCAL = ("base", "cpu")
"""Without a digest: kind and minikube take an image from this machine."""

COMBINATIONS = {
    "cpu+api-keys": ("cpu", ("api-keys",)),
    "cpu+gateway": ("cpu", ("gateway",)),
    "cpu+ingress-nginx": ("cpu", ("ingress-nginx",)),
    "cpu+monitoring": ("cpu", ("monitoring",)),
    "cpu+ingress-nginx+monitoring+api-keys": ("cpu", ("ingress-nginx", "monitoring", "api-keys")),
    "eks+monitoring+head-ha": ("eks", ("monitoring", "head-ha")),
    "gke+monitoring+head-ha": ("gke", ("monitoring", "head-ha")),
    "gpu-shared+gateway+monitoring": ("gpu-shared", ("gateway", "monitoring")),
    "gpu-single+incremental-upgrade": ("gpu-single", ("incremental-upgrade",)),
    "inference-gateway+monitoring": ("inference-gateway", ("monitoring",)),
}

NAMES = ["base", *(path.name for path in OVERLAYS), *COMBINATIONS]


@cache
def rendering_of(name: str) -> Rendering:
    """Return a rendering by its name; callers must not change it."""
    return Rendering(_label(name), parse(text_of(name)), is_local=name.split("+")[0] in LOCAL)


@cache
def text_of(name: str) -> str:
    """Return the text that kubectl renders."""
    if name == "base":
        return render(BASE)
    if name not in COMBINATIONS:
        return render(ROOT / "k8s" / "overlays" / name)
    overlay, components = COMBINATIONS[name]
    folder = Path(tempfile.mkdtemp(prefix="raystream-k8s-"))
    try:
        return render_with(ROOT / "k8s" / "overlays" / overlay, components, folder)
    finally:
        shutil.rmtree(folder)


def _label(name: str) -> str:
    return "k8s/base" if name == "base" else name
