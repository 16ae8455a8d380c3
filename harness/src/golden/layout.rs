//! Layout vectors: lengths, owners and slots as plain integers.

use serde::Serialize;
use shardcheck_references::layout::Layout;

/// One layout and one request.
#[derive(Serialize)]
struct LayoutVector {
    world: usize,
    interleave: usize,
    block: usize,
    length: usize,
    query_rows: usize,
    block_table: Vec<i32>,
    /// `[W]`
    local_lens: Vec<usize>,
    /// `[W][length]`, −1 where not owned
    slots: Vec<Vec<i64>>,
    /// `[W][query_rows]`
    row_lens: Vec<Vec<usize>>,
    virtual_block_tokens: usize,
}

/// The file.
pub(super) fn file() -> Vec<u8> {
    let mut vectors = Vec::new();
    for world in [1, 2, 3, 4, 5, 8] {
        for (interleave, block) in [(1, 4), (2, 4), (4, 4), (1, 1), (16, 16)] {
            let layout = Layout::new(world, interleave, block).expect("S divides B");
            for length in [0, 1, world - 1, world, world * interleave + 1, block * world + 1, 37] {
                vectors.push(vector(&layout, length));
            }
        }
    }
    let mut text = String::from("[\n");
    for (index, vector) in vectors.iter().enumerate() {
        let line = serde_json::to_string(vector).expect("integers are plain data");
        text += &format!("{line}{}\n", if index + 1 < vectors.len() { "," } else { "" });
    }
    (text + "]\n").into_bytes()
}

fn vector(layout: &Layout, length: usize) -> LayoutVector {
    let world = layout.world();
    let query_rows = length.min(3);
    let block_table: Vec<i32> = (0..layout.blocks_needed(length)).map(|block| 7 + 2 * block as i32).collect();
    LayoutVector {
        world,
        interleave: layout.interleave(),
        block: layout.block(),
        length,
        query_rows,
        local_lens: (0..world).map(|rank| layout.local_len(length, rank)).collect(),
        slots: (0..world)
            .map(|rank| (0..length).map(|position| layout.slot(position, rank, &block_table)).collect())
            .collect(),
        row_lens: (0..world)
            .map(|rank| (0..query_rows).map(|t| layout.verify_row_len(length, query_rows, t, rank)).collect())
            .collect(),
        block_table,
        virtual_block_tokens: layout.virtual_block_tokens(),
    }
}
