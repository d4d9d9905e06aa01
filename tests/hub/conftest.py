"""The loopback hub in the place of the real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub.hub_server import Hub
from huggingface_hub import close_session, constants


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that huggingface_hub takes for its own, with an empty cache and no token, in an empty working directory."""
    with Hub() as running:
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": running.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_DOWNLOAD_TIMEOUT": 5,
            "HF_HUB_ETAG_TIMEOUT": 5,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents.json"), raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
        yield running
        close_session()
