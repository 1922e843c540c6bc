from gemsmith.plan.aot.collectives import hops_of, links_of, read_group, read_pairs

SQUARE = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0))


def test_groups_are_read_in_every_form():
    assert read_group("replica_groups={{0,2},{1,3}}, x", 4) == (0, 2)
    assert read_group("replica_groups=[2,4]<=[8], x", 8) == (0, 1, 2, 3)
    assert read_group("replica_groups=[4,2]<=[2,4]T(1,0), x", 8) == (0, 4)
    assert read_group("replica_groups=[4,2]<=[2,4], x", 8) == (0, 1)
    assert read_group("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, x", 8) == (0, 4)
    assert read_group("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}, x", 8) == tuple(range(8))
    assert read_group("x", 4) == (0, 1, 2, 3)
    assert read_pairs("source_target_pairs={{0,1},{1,0}}, x") == ((0, 1), (1, 0))


def test_links_are_those_of_the_worst_placed_chip():
    row = [(x, 0, 0) for x in range(4)]
    assert links_of(range(4), SQUARE) == 2 and links_of((0, 1), SQUARE) == 1 and links_of((0, 3), SQUARE) == 1
    assert links_of(range(4), row) == 1 and links_of(range(4), ()) == 2
    assert hops_of(((0, 1), (3, 0)), row) == 3 and hops_of(((0, 1),), ()) == 1
