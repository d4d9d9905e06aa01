"""tests/vllm/inside, in vLLM's own Python: what the plugin does to vLLM's configs, registries and layers."""

from vllm_runs import HERE, Vllm, tail


def test_inside_vllm(vllm: Vllm) -> None:
    inside = HERE / "inside"
    ended = vllm.run(
        ["-m", "pytest", inside, "--confcutdir", inside, "-o", f"pythonpath={HERE}", "-p", "no:cacheprovider",
         "-W", "ignore::DeprecationWarning", "--tb=short", "--show-capture=no"],
        environment={"VLLM_PLUGINS": "oddrank"},  # of the plugins installed there, only this one
    )  # fmt: skip
    print(tail(ended.log, 400))
    assert ended.code == 0, tail(ended.log, 400)
    assert " passed" in ended.log.splitlines()[-1] and "skipped" not in ended.log.splitlines()[-1]
