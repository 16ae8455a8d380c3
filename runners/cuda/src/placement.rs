//! Which device plays which rank: rank r is on device r mod G, there the r / G-th.

/// Ranks of a session over devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Devices G.
    pub devices: usize,
    /// All ranks.
    pub ranks: usize,
    /// Ranks W of a group; divides `ranks`.
    pub world: usize,
}

/// Where the members of a group are: member m is on device `seats[(m + turn) % seats.len()]`, there the `m / seats.len()`-th of the
/// group's members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSeats {
    /// The group's devices, ascending.
    pub seats: Vec<usize>,
    /// Members of a device that has the most.
    pub places: usize,
    /// By how many devices the first member is off the first one.
    pub turn: usize,
}

impl Placement {
    /// Devices that play a rank.
    pub fn seats(&self) -> usize {
        self.devices.min(self.ranks)
    }

    /// Groups of the session.
    pub fn groups(&self) -> usize {
        self.ranks / self.world
    }

    /// Ranks that a device plays, in its own order.
    pub fn ranks_of(&self, seat: usize) -> impl Iterator<Item = usize> + use<> {
        (seat..self.ranks).step_by(self.devices)
    }

    /// The device of a rank, and its place there.
    pub fn place_of(&self, rank: usize) -> (usize, usize) {
        (rank % self.devices, rank / self.devices)
    }

    /// Where the members of a group are.
    pub fn group(&self, number: usize) -> GroupSeats {
        let start = number * self.world % self.devices;
        if self.world >= self.devices {
            let places = self.world.div_ceil(self.devices);
            return GroupSeats { seats: (0..self.devices).collect(), places, turn: start };
        }
        // devices from `start` on, those beyond the last counting from the first again
        let wrapped = (start + self.world).saturating_sub(self.devices);
        let end = (start + self.world).min(self.devices);
        GroupSeats { seats: (0..wrapped).chain(start..end).collect(), places: 1, turn: wrapped }
    }

    /// The members of a group that a device plays: the first of them among the device's ranks, and how many there are.
    pub fn members(&self, number: usize, seat: usize) -> (usize, usize) {
        let group = number * self.world..(number + 1) * self.world;
        let before = self.ranks_of(seat).filter(|rank| *rank < group.start).count();
        (before, self.ranks_of(seat).filter(|rank| group.contains(rank)).count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every session of up to 12 ranks on up to 5 devices.
    fn all() -> impl Iterator<Item = Placement> {
        (1..=5).flat_map(|devices| {
            (1..=12usize).flat_map(move |ranks| {
                let divides = move |world: &usize| ranks.is_multiple_of(*world);
                (1..=ranks).filter(divides).map(move |world| Placement { devices, ranks, world })
            })
        })
    }

    #[test]
    fn every_rank_is_played_once_and_where_its_place_says() {
        for placement in all() {
            let mut seen = vec![0; placement.ranks];
            for seat in 0..placement.seats() {
                for (place, rank) in placement.ranks_of(seat).enumerate() {
                    seen[rank] += 1;
                    assert_eq!(placement.place_of(rank), (seat, place), "{placement:?}");
                }
            }
            assert_eq!(seen, vec![1; placement.ranks], "{placement:?}");
        }
    }

    #[test]
    fn the_members_of_a_group_are_where_its_turn_says() {
        for placement in all() {
            for number in 0..placement.groups() {
                let group = placement.group(number);
                assert!(
                    group.seats.is_sorted() && group.seats.len() == placement.world.min(placement.devices)
                );
                for member in 0..placement.world {
                    let (seat, place) = placement.place_of(number * placement.world + member);
                    let (first, count) = placement.members(number, seat);
                    let devices = group.seats.len();
                    assert_eq!(group.seats[(member + group.turn) % devices], seat, "{placement:?} {number}");
                    assert_eq!(place - first, member / devices, "{placement:?} {number}");
                    assert!(count <= group.places && count + 1 >= group.places, "{placement:?} {number}");
                }
            }
        }
    }

    #[test]
    fn three_members_on_two_devices_turn_from_group_to_group() {
        let placement = Placement { devices: 2, ranks: 6, world: 3 };
        assert_eq!(placement.group(0), GroupSeats { seats: vec![0, 1], places: 2, turn: 0 });
        assert_eq!(placement.group(1), GroupSeats { seats: vec![0, 1], places: 2, turn: 1 });
        assert_eq!([placement.members(1, 0), placement.members(1, 1)], [(2, 1), (1, 2)]);
    }

    #[test]
    fn a_group_of_fewer_members_than_devices_may_go_round_the_end() {
        let placement = Placement { devices: 4, ranks: 6, world: 3 };
        assert_eq!(placement.group(1), GroupSeats { seats: vec![0, 1, 3], places: 1, turn: 2 });
    }
}
