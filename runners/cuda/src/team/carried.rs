//! What passes between ranks: a kernel where one device plays them all, else kernels around a collective of the devices of each group.

use std::sync::Arc;

use shardcheck_collectives::Element;
use shardcheck_engine::EngineError;

use super::{Seat, Team};
use crate::exchange::Wire;
use crate::placement::GroupSeats;
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::shape::{Group, Shape};

impl Team {
    /// `to [ranks, W, bytes]` on every device out of `from [ranks, bytes]`: an all-gather in every group. Devices of a rank that `keeps_out`
    /// do not enter.
    ///
    /// # Errors
    /// What the driver or the collectives say.
    pub fn gather(
        &self,
        name: &'static str,
        from: &[&Buffer],
        to: &[&Buffer],
        bytes: usize,
        keeps_out: &dyn Fn(usize) -> bool,
    ) -> Result<(), EngineError> {
        if bytes == 0 {
            self.pass(1);
            return Ok(());
        }
        let world = self.placement.world;
        let Some(fabric) = &self.fabric else {
            let Seat { queue, shape } = self.first();
            let (kernel, units) =
                if bytes.is_multiple_of(2) { ("gather_words", bytes / 2) } else { ("gather_bytes", bytes) };
            let arguments =
                [Argument::Shape(*shape), from[0].argument(), Argument::Long(units as i64), to[0].argument()];
            return queue.launch(kernel, Extent::over(shape.ranks as usize * world * units), &arguments);
        };
        for number in 0..self.placement.groups() {
            let group = self.placement.group(number);
            let (devices, places) = (group.seats.len(), group.places);
            let pieces = self.of_group(&group, |seat, queue| {
                let (first, count) = self.placement.members(number, seat);
                let given = self.padded(queue, from[seat], (first, count, places), bytes)?;
                let all = queue.allocate(devices * places * bytes)?;
                queue.fill(&all, 0xFF)?;
                Ok((given, all))
            })?;
            let collective = self.collective(name, number, &group, keeps_out);
            self.run(fabric, &collective, |index, communicator, stream| {
                let (given, all) = &pieces[index];
                let (given, all) = (given.pointer(), all.pointer());
                // SAFETY: both buffers have room for the places of every device, and live until the stream has come so far.
                unsafe { communicator.all_gather(given, all, places * bytes, Element::U8, stream) }
            })?;
            self.spread("spread_gathered", number, &pieces, bytes, to)?;
        }
        Ok(())
    }

    /// `to [ranks, W, words]` on every device out of `from [ranks, W, words]`, in 16-bit words: an all-to-all in every group.
    ///
    /// # Errors
    /// What the driver or the collectives say.
    pub fn all_to_all(
        &self,
        name: &'static str,
        from: &[&Buffer],
        to: &[&Buffer],
        words: usize,
    ) -> Result<(), EngineError> {
        if words == 0 {
            self.pass(1);
            return Ok(());
        }
        let world = self.placement.world;
        let Some(fabric) = &self.fabric else {
            let Seat { queue, shape } = self.first();
            let arguments =
                [Argument::Shape(*shape), from[0].argument(), Argument::Long(words as i64), to[0].argument()];
            let extent = Extent::over(shape.ranks as usize * world * words);
            return queue.launch("exchange_words", extent, &arguments);
        };
        for number in 0..self.placement.groups() {
            let group = self.placement.group(number);
            let (devices, places) = (group.seats.len(), group.places);
            let piece = places * places * words;
            let pieces = self.of_group(&group, |seat, queue| {
                let (bundles, arrived) =
                    (queue.allocate(2 * devices * piece)?, queue.allocate(2 * devices * piece)?);
                queue.fill(&bundles, 0xFF)?;
                queue.fill(&arrived, 0xFF)?;
                let (shape, share) = self.share(number, seat, &group);
                let arguments = [
                    Argument::Shape(shape),
                    Argument::Group(share),
                    from[seat].argument(),
                    Argument::Long(words as i64),
                    bundles.argument(),
                ];
                let extent = Extent::over(devices * share.count as usize * places * words);
                queue.launch("bundle_words", extent, &arguments)?;
                Ok((bundles, arrived))
            })?;
            let collective = self.collective(name, number, &group, &|_| false);
            self.run(fabric, &collective, |index, communicator, stream| {
                let (bundles, arrived) = &pieces[index];
                let (bundles, arrived) = (bundles.pointer(), arrived.pointer());
                // SAFETY: both buffers hold a piece for every device, and live until the stream has come so far.
                unsafe { communicator.all_to_all(bundles, arrived, 2 * piece, (Element::U8, 1), stream) }
            })?;
            self.spread("spread_arrived", number, &pieces, words, to)?;
        }
        Ok(())
    }

    /// `to [ranks, parts, elements]` on every device out of `from [ranks, W, elements]`: a reduce-scatter in every group. The number of
    /// parts that are left to be added: W where one device plays all ranks, 1 where a collective has added them.
    ///
    /// # Errors
    /// What the driver or the collectives say.
    pub fn reduce_scatter(
        &self,
        name: &'static str,
        from: &[&Buffer],
        to: &[&Buffer],
        elements: usize,
        wire: Wire,
    ) -> Result<usize, EngineError> {
        let Some(fabric) = &self.fabric else {
            self.all_to_all(name, from, to, elements * wire.bytes() / 2)?;
            return Ok(self.placement.world);
        };
        if elements == 0 {
            self.pass(1);
            return Ok(1);
        }
        let element = match wire {
            Wire::Bf16 => Element::Bf16,
            Wire::F16 => Element::F16,
            Wire::F32 => Element::F32,
        };
        for number in 0..self.placement.groups() {
            let group = self.placement.group(number);
            let (devices, places) = (group.seats.len(), group.places);
            let bytes = elements * wire.bytes();
            let pieces = self.of_group(&group, |seat, queue| {
                let (sums, own) =
                    (queue.allocate(devices * places * bytes)?, queue.allocate(places * bytes)?);
                queue.fill(&sums, 0xFF)?;
                queue.fill(&own, 0xFF)?;
                let (shape, share) = self.share(number, seat, &group);
                let arguments = [
                    Argument::Shape(shape),
                    Argument::Group(share),
                    from[seat].argument(),
                    Argument::Long(elements as i64),
                    wire.argument(),
                    sums.argument(),
                ];
                queue.launch("sum_members", Extent::over(devices * places * elements), &arguments)?;
                Ok((sums, own))
            })?;
            let collective = self.collective(name, number, &group, &|_| false);
            self.run(fabric, &collective, |index, communicator, stream| {
                let (sums, own) = &pieces[index];
                let (sums, own) = (sums.pointer(), own.pointer());
                // SAFETY: one buffer has room for the places of every device, the other for its own; both live until the stream has
                // come so far.
                unsafe { communicator.reduce_scatter(sums, own, places * elements, element, stream) }
            })?;
            self.of_group(&group, |seat, queue| {
                let index = group.seats.iter().position(|other| *other == seat).unwrap_or(0);
                let (first, count) = self.placement.members(number, seat);
                queue.copy_part((&pieces[index].1, 0), (to[seat], first * bytes), count * bytes)
            })?;
        }
        Ok(1)
    }

    /// The library's own all-gather over the devices of the first group, `bytes` of each, to be timed.
    ///
    /// # Errors
    /// What the driver or the collectives say.
    pub fn all_gather_alone(&self, buffers: &[(Buffer, Buffer)], bytes: usize) -> Result<(), EngineError> {
        let Some(fabric) = &self.fabric else { return Ok(()) };
        let group = self.placement.group(0);
        let collective = self.collective("all_gather", 0, &group, &|_| false);
        self.run(fabric, &collective, |index, communicator, stream| {
            let (from, to) = &buffers[index];
            // SAFETY: one buffer holds the bytes of a device, the other those of all; both live until the stream has come so far.
            unsafe { communicator.all_gather(from.pointer(), to.pointer(), bytes, Element::U8, stream) }
        })
    }

    /// Takes apart what arrived on each device of a group, the second of its `pieces`, for its members: `unit` elements from each of W.
    fn spread(
        &self,
        kernel: &'static str,
        number: usize,
        pieces: &[(Buffer, Buffer)],
        unit: usize,
        to: &[&Buffer],
    ) -> Result<(), EngineError> {
        let group = self.placement.group(number);
        for (seat, (_, arrived)) in group.seats.iter().zip(pieces) {
            let (shape, share) = self.share(number, *seat, &group);
            let arguments = [
                Argument::Shape(shape),
                Argument::Group(share),
                arrived.argument(),
                Argument::Long(unit as i64),
                to[*seat].argument(),
            ];
            let extent = Extent::over(share.count as usize * self.placement.world * unit);
            self.seats[*seat].queue.launch(kernel, extent, &arguments)?;
        }
        Ok(())
    }

    /// Something for each device of a group, in their order.
    fn of_group<T>(
        &self,
        group: &GroupSeats,
        make: impl Fn(usize, &Arc<Queue>) -> Result<T, EngineError>,
    ) -> Result<Vec<T>, EngineError> {
        group.seats.iter().map(|seat| make(*seat, &self.seats[*seat].queue)).collect()
    }

    /// What the kernels know of a device's part of a group.
    fn share(&self, number: usize, seat: usize, group: &GroupSeats) -> (Shape, Group) {
        let (first, count) = self.placement.members(number, seat);
        let [first, count, devices, places, turn] =
            [first, count, group.seats.len(), group.places, group.turn].map(|value| value as i32);
        (self.seats[seat].shape, Group { first, count, devices, places, turn })
    }

    /// What a device's members of a group have, in a buffer of as many places as the fullest device needs.
    fn padded(
        &self,
        queue: &Arc<Queue>,
        from: &Buffer,
        (first, count, places): (usize, usize, usize),
        bytes: usize,
    ) -> Result<Buffer, EngineError> {
        let given = queue.allocate(places * bytes)?;
        queue.fill(&given, 0xFF)?;
        queue.copy_part((from, first * bytes), (&given, 0), count * bytes)?;
        Ok(given)
    }
}
