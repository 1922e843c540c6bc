from gemsmith.recipe.serving import BURST, GRIDS, Bench


def test_the_papers_grid_is_its_table() -> None:
    loads = GRIDS["paper"].loads
    closed = [load for load in loads if load.max_concurrency]
    assert [(load.input_tokens, load.output_tokens, load.max_concurrency) for load in closed] == [(128, 256, 64)]
    once, *opened = [load for load in loads if not load.max_concurrency]
    assert (once.input_tokens, once.output_tokens, once.request_rate) == (128, 256, 10_000)
    assert {(load.input_tokens, load.output_tokens) for load in opened} == {
        (512, 256),
        (1024, 512),
        (4096, 512),
        (8192, 512),
        (15_360, 512),
    }
    for tokens in {load.input_tokens for load in opened}:
        rates = [load.request_rate for load in opened if load.input_tokens == tokens]
        assert rates == [1, 2, 4, 8, 16, 32, 64, BURST]


def test_the_longest_request_of_the_paper_fits_its_servers_16k() -> None:
    assert max(load.input_tokens + load.output_tokens for load in GRIDS["paper"].loads) <= 16_384


def test_only_requests_at_a_rate_of_their_own_can_leave_a_server_behind() -> None:
    assert sum(load.is_open for load in GRIDS["paper"].loads) == 5 * 7


def test_the_grid_that_sends_what_the_paper_sent_has_the_others_loads_but_the_steady_state() -> None:
    paper, sent = GRIDS["paper"], GRIDS["paper-30"]
    assert [load for load in paper.loads if load not in sent.loads] == [paper.loads[1]]
    assert paper.loads[1].max_concurrency == 64 and set(sent.exact) == set(sent.loads)
    own = Bench.model_validate({"input_tokens": [128], "output_tokens": 256, "request_rates": [10_000]}).plan
    assert own.loads == paper.loads[:1] and not own.exact


def test_every_grid_can_be_named_in_a_recipe() -> None:
    for name in GRIDS:
        assert Bench.model_validate({"grid": name}).plan is GRIDS[name]
