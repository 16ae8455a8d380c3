//! Carrying a 32-bit LSE through a 16-bit buffer: two halves, bit for bit.
//!
//! ATOM `cp_lse_a2a` puts the high half first, vLLM `dcp_a2a_lse_reduce` the low half. No float operation may touch
//! a half: many of them are NaNs of the 16-bit type.

use shardcheck_engine::LaneOrder;

/// How LSEs are packed.
#[derive(Clone, Copy, PartialEq)]
pub struct LanePolicies {
    /// The two lanes of an LSE's bits, in wire order.
    pub pack: fn(u32, LaneOrder) -> [u16; 2],
    /// The bits of two lanes.
    pub unpack: fn([u16; 2], LaneOrder) -> u32,
}

impl LanePolicies {
    /// As published.
    pub const HEALTHY: Self = Self { pack, unpack };
}

/// The two lanes of an LSE's bits, in wire order.
pub fn pack(bits: u32, order: LaneOrder) -> [u16; 2] {
    let (high, low) = ((bits >> 16) as u16, bits as u16);
    match order {
        LaneOrder::HiLo => [high, low],
        LaneOrder::LoHi => [low, high],
    }
}

/// The bits of two lanes.
pub fn unpack(lanes: [u16; 2], order: LaneOrder) -> u32 {
    let [high, low] = match order {
        LaneOrder::HiLo => lanes,
        LaneOrder::LoHi => [lanes[1], lanes[0]],
    };
    u32::from(high) << 16 | u32::from(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_halves_lie_in_the_published_order() {
        assert_eq!(pack(0xC049_0FDB, LaneOrder::HiLo), [0xC049, 0x0FDB]);
        assert_eq!(pack(0xC049_0FDB, LaneOrder::LoHi), [0x0FDB, 0xC049]);
        assert_eq!(pack(f32::NEG_INFINITY.to_bits(), LaneOrder::HiLo), [0xFF80, 0]);
    }

    #[test]
    fn bit_patterns_survive_in_both_orders_nan_halves_included() {
        for order in LaneOrder::ALL {
            for high in 0..=u16::MAX {
                for low in [0, 1, 0x7FC1, 0x7F80, 0xFF80, 0xFFFF] {
                    let bits = u32::from(high) << 16 | low;
                    assert_eq!(unpack(pack(bits, order), order), bits);
                    assert_eq!(unpack(pack(bits.rotate_left(16), order), order), bits.rotate_left(16));
                }
            }
        }
    }
}
