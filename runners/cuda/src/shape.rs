//! What the kernels know of a session, and what the host has to agree with them on.

use shardcheck_engine::{Attention, Configuration, LaneOrder};
use shardcheck_formats::Dtype;

use crate::placement::Placement;

/// `Group` of the kernels, field by field.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Group {
    pub first: i32,
    pub count: i32,
    pub devices: i32,
    pub places: i32,
    pub turn: i32,
}

/// `Shape` of the kernels, field by field.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Shape {
    pub ranks: i32,
    pub first: i32,
    pub step: i32,
    pub all: i32,
    pub world: i32,
    pub interleave: i32,
    pub block: i32,
    pub blocks: i32,
    pub own: i32,
    pub heads: i32,
    pub width: i32,
    pub kv_heads: i32,
    pub key_dim: i32,
    pub value_dim: i32,
    pub shared: i32,
    pub dtype: i32,
    pub low_first: i32,
    pub kv_scale: f32,
    pub kv_inverse: f32,
    pub score_scale: f32,
}

impl Shape {
    /// Of a configuration that was checked, on one device that plays all ranks.
    pub fn of(configuration: &Configuration) -> Self {
        let attention = configuration.attention;
        let heads = configuration.gathered_heads();
        Self {
            ranks: configuration.tp as i32,
            first: 0,
            step: 1,
            all: configuration.tp as i32,
            world: configuration.dcp as i32,
            interleave: configuration.interleave as i32,
            block: configuration.block_size as i32,
            blocks: configuration.blocks as i32,
            own: configuration.heads_per_rank as i32,
            heads: heads as i32,
            width: kernel_width(heads, &configuration.kernel_head_widths) as i32,
            kv_heads: attention.kv_heads() as i32,
            key_dim: attention.qk_dim() as i32,
            value_dim: attention.value_dim() as i32,
            shared: i32::from(matches!(attention, Attention::Mla { .. })),
            dtype: code_of(configuration.kv_dtype).unwrap_or(0),
            low_first: i32::from(configuration.lane_order == LaneOrder::LoHi),
            kv_scale: configuration.kv_scale,
            kv_inverse: 1.0 / configuration.kv_scale,
            score_scale: configuration.softmax_scale,
        }
    }

    /// What one of several devices knows: its ranks alone.
    #[must_use]
    pub fn of_seat(self, placement: &Placement, seat: usize) -> Self {
        Self {
            ranks: placement.ranks_of(seat).count() as i32,
            first: seat as i32,
            step: placement.devices as i32,
            all: placement.ranks as i32,
            ..self
        }
    }

    /// Bytes of a token's keys in a rank's cache.
    pub fn key_bytes(&self, dtype: Dtype) -> usize {
        (self.kv_heads * self.key_dim) as usize * dtype.size_bytes()
    }

    /// Bytes of a token's values, 0 where they are part of the keys.
    pub fn value_bytes(&self, dtype: Dtype) -> usize {
        if self.shared != 0 { 0 } else { (self.kv_heads * self.value_dim) as usize * dtype.size_bytes() }
    }
}

/// The next wider width that the kernel is said to know; the heads themselves where none is as wide (ATOM `mla_dcp_kernel_num_heads`).
pub fn kernel_width(heads: usize, widths: &[usize]) -> usize {
    widths.iter().copied().filter(|width| *width >= heads).min().unwrap_or(heads)
}

/// `Code` of the kernels.
pub fn code_of(dtype: Dtype) -> Option<i32> {
    Some(match dtype {
        Dtype::Bf16 => 0,
        Dtype::F16 => 1,
        Dtype::F32 => 2,
        Dtype::E4m3fn => 3,
        Dtype::E4m3fnuz => 4,
        Dtype::E5m2 => 5,
        _ => return None,
    })
}

/// Blocks of heads of a row in the plain kernel: each reads one KV head, and those of padding the last.
pub fn head_blocks(shape: &Shape) -> usize {
    let (heads, kv_heads, width) = (shape.heads as usize, shape.kv_heads as usize, shape.width as usize);
    let group = heads / kv_heads;
    let each = group.div_ceil(shardcheck_kernels::BLOCK_HEADS);
    (kv_heads - 1) * each + (width - (kv_heads - 1) * group).div_ceil(shardcheck_kernels::BLOCK_HEADS)
}

/// Heads of one block of the dense kernel: the most, up to a block, that never straddle two KV heads on any rank.
pub fn dense_block_heads(shape: &Shape) -> usize {
    let (group, own) = ((shape.heads / shape.kv_heads) as usize, shape.own as usize);
    let fits = |count: &usize| own.is_multiple_of(*count) && group.is_multiple_of(*count);
    (1..=shardcheck_kernels::BLOCK_HEADS).rev().find(fits).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_is_as_long_as_the_twenty_words_of_the_kernels() {
        assert_eq!((size_of::<Shape>(), size_of::<Group>()), (20 * 4, 5 * 4));
    }

    #[test]
    fn widths_are_the_next_wider_one() {
        assert_eq!(kernel_width(24, &[16, 32, 64]), 32);
        assert_eq!(kernel_width(96, &[16, 32, 64]), 96);
        assert_eq!(kernel_width(96, &[]), 96);
    }

    #[test]
    fn blocks_of_heads_never_straddle_a_kv_head() {
        let shape = |heads, kv_heads, width, own| Shape {
            heads,
            kv_heads,
            width,
            own,
            ..Shape::of(&crate::test_configuration())
        };
        assert_eq!(head_blocks(&shape(128, 1, 128, 16)), 16);
        assert_eq!(head_blocks(&shape(6, 3, 6, 2)), 3);
        assert_eq!(head_blocks(&shape(24, 2, 32, 24)), 2 + 3);
        assert_eq!(dense_block_heads(&shape(6, 3, 6, 2)), 2);
        assert_eq!(dense_block_heads(&shape(24, 2, 24, 3)), 3);
        assert_eq!(dense_block_heads(&shape(128, 1, 128, 16)), 8);
    }
}
