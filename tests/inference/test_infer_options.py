"""Options of bulk inference are checked together."""

import pytest

from spec_t5x.errors import InputError
from spec_t5x.inference.infer_options import HostOptions, InferOptions


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": "gs://bucket/in"}, "input is gs://bucket/in: give a path of a file system"),
        ({"output_dir": "gs://bucket/out", "input": "in"}, "give a path of a file system"),
        ({"input": "~no-one/in"}, "~no-one/in names no home directory .*: give the whole path"),
        ({"output_dir": "~no-one/out", "merge": True}, "~no-one/out names no home directory"),
        ({"input": "in", "mixture_or_task": "task"}, "mixture_or_task 'task': give one"),
        ({"input": "in", "shard_size": 0}, "shard_size is 0: give at least 1"),
        (
            {"input": "in", "task_feature_lengths": {"input": 5}},
            "task_feature_lengths is {'input': 5}: give",
        ),
        ({"input": "in", "shard_count": 2}, "shard_index is None and shard_count 2: give both"),
        ({"input": "in", "shard_index": 2}, "shard_index is 2 and shard_count None: give both"),
        ({"input": "in", "shard_index": 2, "shard_count": 2}, "an index from 0 to below the count"),
        (
            {"input": "in", "shard_index": 0, "shard_count": 2, "overwrite": True},
            "overwrite would delete what other workers have written",
        ),
        ({"mixture_or_task": "task", "field": "text"}, "field is 'text', which only JSON lines"),
        ({"input": "in", "model_parallel": 0}, "model_parallel is 0: give at least 1"),
        # gin files may bind texts, and every text but "" counts as true.
        ({"input": "in", "overwrite": "no"}, "overwrite is 'no': give a value of type bool"),
        ({"input": "in", "merge": "False"}, "merge is 'False': give a value of type bool"),
        ({"input": 5}, "input is 5: give a value of type str"),
        ({"output_dir": True, "input": "in"}, "output_dir is True: give a value of type str"),
        ({"input": "in", "shard_size": True}, "shard_size is True: give a value of type int"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        InferOptions(**{"output_dir": "out"} | options).check()


def test_shards_are_joined_without_inputs():
    joins = InferOptions(output_dir="out", merge=True, shard_index=1, shard_count=2)
    joins.check()
    assert joins.workers == (1, 2)


@pytest.mark.parametrize("given", [("a:1", None, None), ("a:1", 2, None), ("a:1", 2, 2)])
def test_a_process_has_all_three_options_of_hosts(given):
    names = ("coordinator_address", "process_count", "process_index")
    with pytest.raises(InputError, match="coordinator_address is a:1, .*: give all three, and an"):
        HostOptions(**dict(zip(names, given, strict=True)))
    assert HostOptions(coordinator_address="a:1", process_count=2, process_index=1)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "node0",
        ":1234",
        "node0:",
        "node0:http",
        "node0:0",
        "node0:65536",
        "http://node0:1",
        "a\nb:1",
        "::1:1",
        "a:b:1",
        "[::1:1",
        "node0:１２",
    ],
)
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(InputError, match="coordinator_address is '.*': give HOST:PORT"):
        HostOptions(coordinator_address=address, process_count=2, process_index=0)


def test_addresses_that_connect():
    for address in ("node0:65535", "10.0.0.1:1", "[::1]:1234", "dns:///node0:1", "ipv4:10.0.0.1:1"):
        HostOptions(coordinator_address=address, process_count=2, process_index=0)
