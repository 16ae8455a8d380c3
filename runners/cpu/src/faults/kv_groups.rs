//! Faults of two KV groups in one session: what belongs to one is used for the other. None of them shows in a session that has one.

use super::{Fault, FaultClass};
use crate::grid::{Grid, Grids};
use crate::policies::{Policies, TableUse};

const fn fault(
    name: &'static str,
    title: &'static str,
    bugs: &'static [&'static str],
    killed_by: &'static [&'static str],
    apply: fn(&mut Policies),
) -> Fault {
    Fault { name, title, class: FaultClass::StaleMetadata, bugs, killed_by, apply }
}

pub(super) const FAULTS: &[Fault] = &[
    fault(
        "second-group-lengths-of-the-first",
        "rows of a second KV group see as many tokens as a rank holds in the first",
        &["local-inference-lab/vllm#57", "vllm-ascend#10878", "vllm-ascend#14236"],
        &["sequence.group-metadata", "sequence.group-output"],
        |p| {
            p.session.group_grids = |group, own, other| match group {
                0 => own,
                _ => Grids { lengths: other, ..own },
            }
        },
    ),
    fault(
        "second-group-pages-of-the-first",
        "pages of a second KV group are read in the first's block size, where that is smaller",
        &["vllm#55600", "vllm#49962"],
        &["sequence.group-output"],
        |p| {
            p.session.group_grids = |group, own, other| match group {
                0 => own,
                _ => Grids { pages: in_blocks_of(other, own.pages), ..own },
            }
        },
    ),
    fault(
        "first-group-pages-of-the-second",
        "pages of the first KV group are read in the second's block size, where that is smaller",
        &["vllm#55600"],
        &["sequence.group-output"],
        |p| {
            p.session.group_grids = |group, own, other| match group {
                0 => Grids { pages: in_blocks_of(other, own.pages), ..own },
                _ => own,
            }
        },
    ),
    fault(
        "second-group-written-by-the-owners-of-the-first",
        "a replicated KV group is written by the ranks alone that own a token in the sharded one",
        &["tpu-inference#3344", "vllm#48392"],
        &["sequence.group-writers", "sequence.group-output"],
        |p| {
            p.session.group_grids = |group, own, other| match group {
                0 => own,
                _ => Grids {
                    slots: Grid { world: other.world, interleave: other.interleave, ..own.slots },
                    ..own
                },
            }
        },
    ),
    fault(
        "second-group-layout-of-the-first",
        "the layout of a second KV group is derived with the world size and interleave of the first",
        &["vllm#45340", "vllm-ascend#14236"],
        &["sequence.group-metadata"],
        |p| {
            p.session.group_grids = |group, own, other| match group {
                0 => own,
                _ => Grids { derived: Grid { block: own.derived.block, ..other }, ..own },
            }
        },
    ),
    fault(
        "second-group-reads-the-table-of-the-first",
        "a second KV group is attended through the block table of the first",
        &["vllm-ascend#4221", "vllm#55600"],
        &["sequence.group-output"],
        |p| {
            p.session.group_table =
                |table_use, group, own, other| taken(own, other, table_use == TableUse::Attend && group == 1)
        },
    ),
    fault(
        "second-group-writes-by-the-table-of-the-first",
        "tokens of a second KV group are written through the block table of the first",
        &["vllm-ascend#7549", "vllm-ascend#4221"],
        &["sequence.group-writers", "sequence.group-untouched"],
        |p| {
            p.session.group_table =
                |table_use, group, own, other| taken(own, other, table_use == TableUse::Write && group == 1)
        },
    ),
    fault(
        "first-group-reads-the-table-that-the-second-left",
        "the first KV group is attended through the block table that the second's last step left in the buffer",
        &["vllm-ascend#4221", "ATOM#1902"],
        &["sequence.group-output"],
        |p| {
            p.session.group_table =
                |table_use, group, own, other| taken(own, other, table_use == TableUse::Attend && group == 0)
        },
    ),
];

/// The layout with blocks of another one's size, where those are smaller: larger ones would end behind the cache.
fn in_blocks_of(other: Grid, own: Grid) -> Grid {
    Grid { block: other.block.min(own.block), ..own }
}

/// The other group's entries where both tables have one that lies in the cache, if `stale`.
fn taken(
    mut own: crate::batch::BlockTable,
    other: &crate::batch::BlockTable,
    stale: bool,
) -> crate::batch::BlockTable {
    for request in 0..own.requests().min(other.requests()) {
        if stale {
            own.replace(request, other.entries(request));
        }
    }
    own
}

#[cfg(test)]
mod tests {
    use shardcheck_engine::{Tensor, Tensors};

    use super::super::faulty::with;
    use super::*;
    use crate::batch::BlockTable;

    const SHARDED: Grid = Grid { world: 3, interleave: 2, block: 4 };
    const REPLICATED: Grid = Grid { world: 1, interleave: 1, block: 8 };

    /// The layouts of both groups, the sharded one first.
    fn grids(name: &str) -> [Grids; 2] {
        let of = with(name).session.group_grids;
        [of(0, Grids::all(SHARDED), REPLICATED), of(1, Grids::all(REPLICATED), SHARDED)]
    }

    #[test]
    fn one_part_of_a_step_goes_by_the_layout_of_the_other_group() {
        let (sharded, replicated) = (Grids::all(SHARDED), Grids::all(REPLICATED));
        for (name, expected) in [
            ("second-group-lengths-of-the-first", Grids { lengths: SHARDED, ..replicated }),
            (
                "second-group-pages-of-the-first",
                Grids { pages: Grid { block: 4, ..REPLICATED }, ..replicated },
            ),
            (
                "second-group-written-by-the-owners-of-the-first",
                Grids { slots: Grid { block: 8, ..SHARDED }, ..replicated },
            ),
            (
                "second-group-layout-of-the-first",
                Grids { derived: Grid { block: 8, ..SHARDED }, ..replicated },
            ),
        ] {
            assert_eq!(grids(name), [sharded, expected], "{name}");
        }
        let first = with("first-group-pages-of-the-second").session.group_grids;
        let small = Grid { block: 2, ..REPLICATED };
        assert_eq!(first(0, sharded, small), Grids { pages: Grid { block: 2, ..SHARDED }, ..sharded });
        assert_eq!(first(0, sharded, REPLICATED), sharded, "larger blocks would end behind the cache");
        assert_eq!(first(1, replicated, SHARDED), replicated);
    }

    fn table(rows: &[[i32; 3]]) -> BlockTable {
        let tensor = Tensor::from_i32(&[rows.len(), 3], &rows.concat());
        BlockTable::read(&Tensors::new().with("block_table", tensor), 16).unwrap()
    }

    #[test]
    fn the_table_of_the_other_group_is_used_where_the_title_says() {
        let (own, other) = (table(&[[1, 2, -7], [3, -7, -7]]), table(&[[9, -7, 8]]));
        let mixed = table(&[[9, 2, -7], [3, -7, -7]]);
        for (name, wrong) in [
            ("second-group-reads-the-table-of-the-first", (TableUse::Attend, 1)),
            ("second-group-writes-by-the-table-of-the-first", (TableUse::Write, 1)),
            ("first-group-reads-the-table-that-the-second-left", (TableUse::Attend, 0)),
        ] {
            for (table_use, group) in
                [TableUse::Attend, TableUse::Write].iter().flat_map(|u| [(*u, 0), (*u, 1)])
            {
                let seen = (with(name).session.group_table)(table_use, group, own.clone(), &other);
                let expected = if (table_use, group) == wrong { &mixed } else { &own };
                assert_eq!(&seen, expected, "{name}: {table_use:?} in group {group}");
            }
        }
    }
}
