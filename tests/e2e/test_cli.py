"""The command line as an operator meets it: real processes, exit codes, one-line errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.keys import block_keys
from kvstore.profile.registry import get_profile
from kvstore.store.format import FORMAT_VERSION, crc32c
from kvstore.store.identity import IDENTITY_NAME
from kvstore.types import ItemKind
from kvstore_client import CacheClient, Costs, ReserveItem
from tests.support.commands import kvstore
from tests.support.service import ServiceProcess, running_service, short_directory


@pytest.fixture
def service():
    with running_service() as running:
        yield running


def _open_tiny(service: ServiceProcess) -> None:
    with CacheClient(service.directory, owner="test") as client:
        identity = NamespaceIdentity(profile=get_profile("tiny"), weights_revision="w", numerics="n")
        client.open_namespace(identity, name="chat")


def _refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert done.stderr.startswith("kvstore")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_a_name_that_several_tenants_have_is_told_apart_by_the_digest(service: ServiceProcess) -> None:
    where = ("--dir", str(service.directory))
    with CacheClient(service.directory, owner="test") as client:
        opened = [
            client.open_namespace(
                NamespaceIdentity(get_profile("tiny"), "w", "n", tenant_salt=tenant), name="chat"
            )
            for tenant in ("a", "b")
        ]
    first, second = (each.digest.hex()[:16] for each in opened)
    _refused(kvstore("policy", "set", "chat", "zero", *where), "several tenants", first, second)
    assert kvstore("policy", "set", second, "zero", *where).returncode == 0
    shown = json.loads(kvstore("policy", "show", *where, "--json").stdout)
    assert {key: (each["name"], each["policy"]) for key, each in shown.items()} == {
        first: ("chat", "endpoints"),
        second: ("chat", "zero"),
    }
    assert kvstore("clear", "--namespace", first, *where).returncode == 0


def test_stats_policy_clear_and_drain_answer_in_text_and_json(
    service: ServiceProcess, tmp_path: Path
) -> None:
    _open_tiny(service)
    where = ("--dir", str(service.directory))

    shown = kvstore("policy", "show", *where)
    assert (shown.returncode, "chat" in shown.stdout, "endpoints" in shown.stdout) == (0, True, True)
    assert kvstore("policy", "set", "chat", "periodic:64", *where).returncode == 0
    after = json.loads(kvstore("policy", "show", *where, "--json").stdout)
    assert after["chat"]["policy"] == "periodic:64"
    assert after["chat"]["states_share_tokens"] % 64 == 0
    assert after["chat"]["states_share_tokens"] > 1 << 20

    file = tmp_path / "stats.json"
    stats = kvstore("stats", *where, "--json", str(file))
    assert stats.returncode == 0
    assert json.loads(file.read_text())["namespaces"] == 1

    cleared = json.loads(kvstore("clear", "--all", *where, "--json").stdout)
    assert cleared == {"blocks": 0, "states": 0}
    dropped = json.loads(kvstore("clear", "--all", "--states", "pool", *where, "--json").stdout)
    assert dropped == {"dropped": 0, "kept_leased": 0}
    assert json.loads(kvstore("drain", *where, "--timeout", "1s", "--json").stdout) == {"left_open": 0}


def test_memory_is_told_and_changed_and_too_much_is_refused(service: ServiceProcess) -> None:
    where = ("--dir", str(service.directory))
    before = json.loads(kvstore("memory", *where, "--json").stdout)
    assert before["cache_budget"] > 0
    assert before["pool_budget"] > 0
    after = json.loads(kvstore("memory", *where, "--cache", "32MiB", "--pool", "16MiB", "--json").stdout)
    assert (after["cache_budget"], after["pool_budget"]) == (32 << 20, 16 << 20)
    assert "33,554,432" in kvstore("memory", *where).stdout
    _refused(kvstore("memory", *where, "--cache", "1024TiB"), "1024TiB", "together")
    assert json.loads(kvstore("memory", *where, "--json").stdout) == after


def test_a_policy_is_set_with_how_many_tokens_the_states_share_holds(service: ServiceProcess) -> None:
    _open_tiny(service)
    where = ("--dir", str(service.directory))
    for policy in ("full", "full+overlap", "endpoints"):
        done = kvstore("policy", "set", "chat", policy, *where)
        assert done.returncode == 0, done.stderr
        shown = json.loads(kvstore("policy", "show", *where, "--json").stdout)["chat"]
        assert shown["policy"] == policy
        held = f"the states of {shown['states_share_tokens']:,} tokens"
        if policy == "endpoints":
            held = f"{shown['states_share_states']:,} states"
        assert f"the disk's share for states holds {held}" in done.stdout
        table = kvstore("policy", "show", *where).stdout
        assert "share holds" in table
        assert held in table
        assert not shown["policy_too_large"]
    assert "no states" in kvstore("policy", "set", "chat", "zero", *where).stdout


def test_a_policy_that_does_not_fit_is_refused_with_the_arithmetic_and_what_is_offered_fits() -> None:
    with running_service(disk=256 << 20) as service:
        _open_tiny(service)
        where = ("--dir", str(service.directory))
        rows = get_profile("tiny").rows_block_bytes
        refused = kvstore("policy", "set", "chat", "full", *where)
        _refused(
            refused, "policy=full", "1,048,576", f"{rows:,} B", f"{(1 << 15) * rows:,} B", "states_share"
        )
        offered = re.search(r"periodic:N with N >= ([0-9]+)", refused.stderr)
        assert offered is not None
        assert kvstore("policy", "set", "chat", f"periodic:{offered[1]}", *where).returncode == 0
        _refused(kvstore("policy", "set", "chat", f"periodic:{int(offered[1]) - 32}", *where), "periodic")


def _store_eight_blocks(service: ServiceProcess) -> list[int]:
    """Blocks [0, 256) of the tokens, a state at 256 on SSD and one at 192 in the pool; the tokens are 300."""
    tokens, size = list(range(300)), 32
    with CacheClient(service.directory, owner="test") as client:
        identity = NamespaceIdentity(profile=get_profile("tiny"), weights_revision="w", numerics="n")
        chat = client.open_namespace(identity, name="chat")
        keys = block_keys(chat.digest, tokens[:256], block_tokens=size)
        items = [
            ReserveItem(
                kind=ItemKind.BLOCK, key=key, parent=parent, position=(i + 1) * size, length=chat.block_bytes
            )
            for i, (key, parent) in enumerate(zip(keys, [chat.digest, *keys], strict=False))
        ]
        for number, to_ssd in ((7, True), (5, False)):
            position = (number + 1) * size
            items.append(
                ReserveItem(
                    kind=ItemKind.STATE,
                    key=keys[number],
                    position=position,
                    length=chat.state_bytes,
                    to_ssd=to_ssd,
                    to_pool=not to_ssd,
                )
            )
        with client.reserve(chat.digest, items) as reservation:
            reservation.write({i: bytes(items[i].length) for i in reservation.granted})
            reservation.commit()
    return tokens


def test_a_plan_is_explained_as_the_service_made_it(service: ServiceProcess, tmp_path: Path) -> None:
    tokens = _store_eight_blocks(service)
    where = ("--dir", str(service.directory), "--namespace", "chat")
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps({"tokens": tokens}))
    done = kvstore("plan", *where, "--tokens", str(file), "--what-if", "100")
    assert done.returncode == 0, done.stderr
    for words in (
        "a prompt of 300 tokens, 9 whole blocks",
        "8 of 9 blocks",
        "a state at 192",
        "CHECKPOINT, EXACT",
    ):
        assert words in done.stdout
    assert done.stdout.count("chosen") == done.stdout.count("runner-up\n") == 1

    document = json.loads(kvstore("plan", *where, "--tokens", str(file), "--what-if", "100", "--json").stdout)
    with CacheClient(service.directory, owner="test") as client:
        digest = client.namespaces()[0].digest
        keys = block_keys(digest, tokens, block_tokens=32)
        found = client.lookup(digest, keys, prompt_tokens=300, lease=False)
        assert client.stats()["leases"] == 0, "a plan that is explained protects nothing"
    for name, way in (("chosen", found.plan.chosen), ("runner_up", found.plan.runner_up)):
        assert way is not None
        told = document[name]
        assert (told["state_source"], told["compute_from"], told["state_at"], told["seconds"]) == (
            way.state_source,
            way.compute_from,
            way.state_at,
            way.seconds,
        )
    assert document["ways"][0] == document["chosen"]
    assert document["runner_up"] in document["ways"]
    assert document["coverage"]["pool_states"] == [192]
    assert document["rates"]["seconds_per_layer_token"] == found.costs.seconds_per_layer_token
    turns = {each["policy"]: each["next_turn"] for each in document["policies"]}
    assert turns["full"]["state_source"] == "ROWS"
    assert turns["zero"]["state_source"] == "REPLAY"

    by_keys = tmp_path / "keys.txt"
    by_keys.write_text("\n".join(key.hex() for key in keys))
    same = kvstore(
        "plan", *where, "--keys", str(by_keys), "--prompt-tokens", "300", "--what-if", "100", "--json"
    )
    assert json.loads(same.stdout) == document


def test_a_prompt_that_goes_another_way_saves_the_state_where_it_branches(
    service: ServiceProcess, tmp_path: Path
) -> None:
    tokens = _store_eight_blocks(service)
    file = tmp_path / "other.txt"
    file.write_text(",".join(map(str, [*tokens[:128], *range(1000, 1100)])))
    asked = ("plan", "--dir", str(service.directory), "--namespace", "chat", "--tokens", str(file))
    assert "at 128 the prompt leaves what is held" in kvstore(*asked).stdout
    exact = json.loads(kvstore(*asked, "--json").stdout)
    assert exact["coverage"]["branch_at"] == 128
    assert (exact["chosen"]["state_source"], exact["exactness"]) == ("REPLAY", "EXACT")
    assert (exact["save_states"]["pool"], exact["save_states"]["ssd"]) == ([128, 224], [128, 224])
    bounded = json.loads(kvstore(*asked, "--exactness", "bounded", "--json").stdout)
    assert (bounded["chosen"]["replay_tokens"], bounded["exactness"]) == (16, "BOUNDED")


def test_under_full_a_plan_reads_rows_and_no_checkpoint(service: ServiceProcess, tmp_path: Path) -> None:
    tokens = _store_eight_blocks(service)
    where = ("--dir", str(service.directory))
    assert kvstore("policy", "set", "chat", "full", *where).returncode == 0
    profile = get_profile("tiny")
    with CacheClient(service.directory, owner="test") as client:
        digest = client.namespaces()[0].digest
        keys = block_keys(digest, tokens[:224], block_tokens=32)
        rows = [
            ReserveItem(
                kind=ItemKind.ROWS,
                key=key,
                position=(i + 1) * 32,
                length=profile.rows_block_bytes,
                to_ssd=True,
            )
            for i, key in enumerate(keys)
        ]
        with client.reserve(digest, rows) as reservation:
            reservation.write({i: bytes(rows[i].length) for i in reservation.granted})
            reservation.commit()
    file = tmp_path / "prompt.txt"
    file.write_text(" ".join(map(str, tokens[:230])))
    done = kvstore("plan", *where, "--namespace", "chat", "--tokens", str(file), "--json")
    document = json.loads(done.stdout)
    chosen = document["chosen"]
    assert (chosen["state_source"], chosen["compute_from"], chosen["state_at"]) == ("ROWS", 224, 220)
    assert chosen["bytes_ssd"] == 7 * profile.block_bytes + profile.rows_block_bytes
    assert document["save_states"]["rows"]
    assert not document["save_states"]["rows_overlap"]
    assert document["save_states"]["ssd"] == []


def test_a_plan_is_priced_with_the_rates_that_callers_report(service: ServiceProcess, tmp_path: Path) -> None:
    tokens = _store_eight_blocks(service)
    file = tmp_path / "prompt.txt"
    file.write_text(" ".join(map(str, tokens)))
    with CacheClient(service.directory, owner="worker") as client:
        digest = client.namespaces()[0].digest
        rates = Costs(seconds_per_layer_token=3e-3, seconds_per_index_entry=7e-7)
        client.lookup(digest, block_keys(digest, tokens, block_tokens=32), prompt_tokens=300, costs=rates)
    done = kvstore(
        "plan", "--dir", str(service.directory), "--namespace", "chat", "--tokens", str(file), "--json"
    )
    document = json.loads(done.stdout)
    assert document["rates"]["seconds_per_layer_token"] == 3e-3
    assert document["rates"]["seconds_per_index_entry"] == 7e-7
    cold = document["ways"][-1]
    assert cold["seconds"] == pytest.approx(
        cold["compute_layer_tokens"] * 3e-3 + cold["index_entries"] * 7e-7
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--namespace", "nobody", "--tokens", "{tokens}"), ("nobody", "chat")),
        (("--namespace", "chat", "--tokens", "/nonexistent"), ("--tokens=/nonexistent",)),
        (("--namespace", "chat", "--tokens", "{words}"), ("tokens[1]", "zwei")),
        (("--namespace", "chat", "--keys", "{tokens}", "--prompt-tokens", "9"), ("keys[0]", "64 hex")),
        (("--namespace", "chat", "--keys", "{tokens}"), ("--prompt-tokens",)),
        (("--namespace", "chat", "--tokens", "{tokens}", "--prompt-tokens", "9"), ("--prompt-tokens=9",)),
        (("--namespace", "chat", "--tokens", "{tokens}", "--what-if", "0"), ("--what-if=0",)),
        (("--namespace", "chat", "--tokens", "{tokens}", "--what-if", "much"), ("--what-if=much",)),
        (("--namespace", "chat", "--tokens", "{tokens}", "--what-if", "9" * 12), ("1 to 4194304",)),
        (("--namespace", "chat", "--tokens", "{tokens}", "--what-if", "9" * 5000), ("not a count",)),
    ],
)
def test_a_plan_of_what_is_no_prompt_is_refused(
    service: ServiceProcess, tmp_path: Path, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    _open_tiny(service)
    files = {"tokens": tmp_path / "tokens.txt", "words": tmp_path / "words.txt"}
    files["tokens"].write_text("1 2 3")
    files["words"].write_text("1 zwei 3")
    given = [arg.format(**files) for arg in args]
    _refused(kvstore("plan", "--dir", str(service.directory), *given), *words)


def test_the_directory_may_come_from_the_environment(service: ServiceProcess) -> None:
    done = kvstore("stats", "blocks", environ={"KVSTORE_DIR": str(service.directory)})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("policy", "set", "chat", "periodic:33"), ("33", "32")),
        (("policy", "set", "chat", "sometimes"), ("sometimes", "zero", "full+overlap")),
        (("policy", "set", "nobody", "zero"), ("nobody", "chat")),
        (("clear", "--namespace", "../chat"), ("../chat",)),
        (("stats", "no-such-figure"), ("no-such-figure",)),
    ],
)
def test_wrong_input_is_one_line_that_says_what_is_allowed(
    service: ServiceProcess, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    _open_tiny(service)
    _refused(kvstore(*args, "--dir", str(service.directory)), *words)


def test_no_service_is_one_line_that_says_what_to_do() -> None:
    with short_directory() as directory:
        _refused(kvstore("stats", "--dir", str(directory)), "kvstore serve")


def test_a_directory_in_use_is_refused_and_its_service_goes_on(service: ServiceProcess) -> None:
    _refused(kvstore("serve", "--dir", str(service.directory)), str(service.directory), "use")
    assert kvstore("stats", "--dir", str(service.directory)).returncode == 0


def test_a_directory_of_a_newer_format_is_refused_by_name_and_left_alone() -> None:
    with short_directory() as directory:
        with ServiceProcess(directory) as running:
            assert running.stop() == 0
        identity = bytearray((directory / IDENTITY_NAME).read_bytes())
        identity[8:12] = (FORMAT_VERSION + 998).to_bytes(4, "little")
        identity[-4:] = crc32c(bytes(identity[:-4])).to_bytes(4, "little")
        (directory / IDENTITY_NAME).write_bytes(identity)
        before = {p.name: p.stat().st_size for p in directory.iterdir()}
        _refused(kvstore("serve", "--dir", str(directory)), str(FORMAT_VERSION + 998), str(FORMAT_VERSION))
        assert {p.name: p.stat().st_size for p in directory.iterdir()} == before


def test_a_directory_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    _refused(kvstore("serve", "--dir", str(tmp_path)), str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--disk", "64XiB"), ("--disk=64XiB", "GiB")),
        (("--disk", "1KiB"), ("--disk",)),
        (("--retention", "3 weeks"), ("--retention",)),
        (("--policy", "sometimes"), ("sometimes",)),
        (("--config", "/nonexistent.toml"), ("/nonexistent.toml",)),
        (("--metrics", "nowhere"), ("nowhere",)),
        (("--wear", "1GiB"), ("wear=1073741824", "a day or more")),
        (("--disk", "8MiB", "--segment", "5MiB"), ("holds fewer than 4 segments", "8MiB")),
    ],
)
def test_serve_refuses_bad_options(tmp_path: Path, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    _refused(kvstore("serve", "--dir", str(tmp_path / "d"), *args), *words)


def test_a_directory_without_space_is_refused(
    tmp_path: Path, require: Callable[[str, bool, str], None]
) -> None:
    mount = tmp_path / "m"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)],
        capture_output=True,
        text=True,
        check=False,
    )
    require("mount", mounted.returncode == 0, f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    try:
        _refused(kvstore("serve", "--dir", str(mount / "d"), "--disk", "1GiB"), "space")
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_workers_and_gateway_refuse_bad_options() -> None:
    for args, words in (
        (("worker", "prefill", "--listen", "unix:/tmp/x.sock", "--profile", "gpt"), ("gpt", "tiny")),
        (("worker", "prefill", "--listen", "tcp:1"), ("tcp:1",)),
        (
            ("worker", "decode", "--listen", "unix:/tmp/x.sock", "--checkpoint", "/nonexistent"),
            ("/nonexistent",),
        ),
        (("demo", "--turns", "3"), ("--turns=3",)),
        (("demo", "--files", "/nonexistent"), ("/nonexistent",)),
        (("demo", "--json", "/nonexistent/demo.json"), ("--json", "/nonexistent/demo.json")),
    ):
        _refused(kvstore(*args), *words)


def test_the_readmes_client_example_runs_as_written(service: ServiceProcess, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    examples = [
        block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "CacheClient" in block
    ]
    assert len(examples) == 1
    program = tmp_path / "example.py"
    program.write_text(examples[0].replace("/data/kv", str(service.directory)))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "compute_from=64" in done.stdout
    assert done.stdout.endswith("0 True\n1 True\n2\n2\n"), (
        "two blocks, fetched and mapped, and found for a prompt that grows"
    )


def test_an_answer_that_cannot_be_written_is_an_error_of_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli.main", "profiles"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No space left" in done.stderr
