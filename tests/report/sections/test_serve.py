"""What the server said of itself."""

from gemsmith.analysis.summary import read_findings
from gemsmith.report import sections as serve
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.records import ServerFacts
from gemsmith.runs.run import read_record, write_record


def test_what_could_not_be_read_is_not_told():
    assert set(serve.server_rows(ServerFacts()).values()) == {"not told"}
    rows = serve.server_rows(ServerFacts(prefix_caching=False, kv_blocks=16_211, tensor_parallel=0))
    assert (rows["prefix_caching"], rows["kv_blocks"], rows["tensor_parallel"]) == ("off", "16,211", "0")


def test_every_fact_of_a_server_is_in_the_table():
    assert set(serve._NAMES) == ServerFacts.model_fields.keys() - {"unread"}


def test_servers_that_said_the_same_share_a_column(large_run):
    assert list(serve.make_serve(read_findings(large_run))["servers"]) == ["serve, bench, eval"]
    bench = read_record(large_run, BenchRecord)
    other = bench.server.model_copy(update={"prefix_caching": True})
    write_record(large_run, bench.model_copy(update={"server": other}))
    assert list(serve.make_serve(read_findings(large_run))["servers"]) == ["serve, eval", "bench"]


def test_records_without_facts_say_so(make_run, section_words):
    assert "is not told: these records were made without it" in section_words(make_run(steps=2), "serve")
