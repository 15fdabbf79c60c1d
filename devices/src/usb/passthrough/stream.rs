//! The transfers of an isochronous endpoint. Those that wait are passed to the kernel together, and
//! several URBs are in flight, so that no interval is without one.

use std::collections::VecDeque;

use host::memory::Memory;
use host::usb::usbfs::{Ended, Handle, Kind, MAX_PACKETS, Urb};

use super::PART;
use crate::usb::{Fault, Transfer, TransferEnd};

struct Batch {
    tag: u64,
    transfers: Vec<Transfer>,
    length: u32,
}

#[derive(Default)]
pub(super) struct Stream {
    waiting: VecDeque<Transfer>,
    flying: VecDeque<Batch>,
}

impl Stream {
    pub(super) fn add(&mut self, transfer: Transfer) {
        self.waiting.push_back(transfer);
    }

    pub(super) fn tags(&self) -> impl Iterator<Item = u64> {
        self.flying.iter().map(|batch| batch.tag)
    }

    /// The number of transfers that have not ended.
    pub(super) fn count(&self) -> usize {
        self.waiting.len() + self.flying.iter().map(|it| it.transfers.len()).sum::<usize>()
    }

    /// Passes waiting transfers to the kernel, up to its room. Returns those that it refuses.
    pub(super) fn submit(
        &mut self,
        handle: &dyn Handle,
        memory: &Memory,
        tags: &mut u64,
    ) -> Vec<TransferEnd> {
        let mut refused = Vec::new();
        loop {
            let flying: u32 = self.flying.iter().map(|it| it.length).sum();
            let transfers = self.next_batch(PART.saturating_sub(flying));
            let Some(first) = transfers.first() else { return refused };
            *tags += 1;
            let (endpoint, tag) = (first.endpoint, *tags);
            match urb(&transfers, memory, tag).and_then(|urb| handle.submit(urb).ok()) {
                Some(()) => {
                    let length = transfers.iter().map(|it| it.length).sum();
                    self.flying.push_back(Batch { tag, transfers, length });
                }
                // The batches in flight end first, and leave room.
                None if !self.flying.is_empty() => {
                    transfers.into_iter().rev().for_each(|it| self.waiting.push_front(it));
                    return refused;
                }
                None => {
                    let end = TransferEnd { endpoint, result: Err(Fault::Gone) };
                    refused.extend(transfers.iter().map(|_| end));
                }
            }
        }
    }

    fn next_batch(&mut self, room: u32) -> Vec<Transfer> {
        let (mut batch, mut length) = (Vec::new(), 0);
        while batch.len() < MAX_PACKETS
            && let Some(next) = self.waiting.pop_front_if(|it| length + it.length <= room)
        {
            length += next.length;
            batch.push(next);
        }
        batch
    }

    /// Takes the result of a URB, and returns those of its transfers.
    pub(super) fn end(&mut self, ended: &Ended, memory: &Memory) -> Option<Vec<TransferEnd>> {
        let at = self.flying.iter().position(|it| it.tag == ended.tag)?;
        let batch = self.flying.remove(at)?;
        let mut start = 0_usize;
        let ends = (0..).zip(&batch.transfers).map(|(number, transfer): (usize, _)| {
            let at = start;
            start += transfer.length as usize;
            let packet = ended.packets.get(number).copied();
            let result = match (ended.result, packet) {
                (Ok(()), Some(Ok(moved))) => deliver(transfer, &ended.data, at, moved, memory),
                _ => Err(Fault::Gone),
            };
            TransferEnd { endpoint: transfer.endpoint, result }
        });
        Some(ends.collect())
    }
}

fn urb(transfers: &[Transfer], memory: &Memory, tag: u64) -> Option<Urb> {
    let mut data = Vec::new();
    for transfer in transfers {
        let start = data.len();
        data.resize(start + transfer.length as usize, 0);
        if !transfer.is_in() {
            transfer.read(memory, &mut data[start..]).ok()?;
        }
    }
    let packets = transfers.iter().map(|it| it.length).collect();
    let endpoint = transfers.first()?.endpoint;
    Some(Urb { kind: Kind::Isochronous, endpoint, tag, data, packets })
}

/// Copies a packet from the device to the guest.
fn deliver(
    transfer: &Transfer,
    data: &[u8],
    start: usize,
    moved: u32,
    memory: &Memory,
) -> Result<u32, Fault> {
    if !transfer.is_in() {
        return Ok(transfer.length);
    }
    // A device that sends too much, or says so, is cut.
    let end = start + moved.min(transfer.length) as usize;
    let packet = data.get(start..end.min(data.len())).unwrap_or_default();
    transfer.write(memory, packet).map_err(|_| Fault::Memory)
}
