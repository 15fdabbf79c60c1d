//! The transfers of all endpoints but the control endpoint.

use std::collections::BTreeMap;

use host::memory::{Memory, subrange};
use host::usb::usbfs::{Ended, Handle, Kind, Urb};
use rustix::io::Errno;

use super::PART;
use super::stream::Stream;
use crate::usb::{Fault, Transfer, TransferEnd};

/// A transfer, of which the kernel has one part at a time.
struct Pipe {
    transfer: Transfer,
    /// The number of bytes that were transferred.
    done: u32,
    /// The URB of the current part, and its length. `None` before it is submitted.
    part: Option<(u64, u32)>,
    /// The guest withdraws the transfer: it ends with this part.
    stopped: bool,
}

#[derive(Default)]
pub(super) struct Pipes {
    pipes: BTreeMap<u8, Pipe>,
    /// Isochronous endpoints.
    streams: BTreeMap<u8, Stream>,
}

impl Pipes {
    pub(super) fn add(&mut self, transfer: Transfer) {
        let endpoint = transfer.endpoint;
        if transfer.is_isochronous {
            self.streams.entry(endpoint).or_default().add(transfer);
            return;
        }
        let pipe = Pipe { done: 0, part: None, stopped: false, transfer };
        self.pipes.insert(endpoint, pipe);
    }

    pub(super) fn remove(&mut self, endpoint: u8) {
        self.pipes.remove(&endpoint);
        self.streams.remove(&endpoint);
    }

    /// The guest withdraws the transfers of an endpoint: a part that has arrived is not lost.
    pub(super) fn stop(&mut self, endpoint: u8) {
        if let Some(pipe) = self.pipes.get_mut(&endpoint) {
            pipe.stopped = true;
        }
        self.streams.remove(&endpoint);
    }

    /// Removes all transfers, and returns their ends.
    pub(super) fn fail(&mut self) -> Vec<TransferEnd> {
        let pipes = std::mem::take(&mut self.pipes).into_keys();
        let streams = std::mem::take(&mut self.streams);
        let streams = streams
            .into_iter()
            .flat_map(|(endpoint, stream)| std::iter::repeat_n(endpoint, stream.count()));
        let gone = |endpoint| TransferEnd { endpoint, result: Err(Fault::Gone) };
        pipes.chain(streams).map(gone).collect()
    }

    pub(super) fn tags(&self) -> Vec<u64> {
        let parts = self.pipes.values().filter_map(|it| it.part).map(|(tag, _)| tag);
        parts.chain(self.streams.values().flat_map(Stream::tags)).collect()
    }

    pub(super) fn tags_of(&self, endpoint: u8) -> Vec<u64> {
        let part = self.pipes.get(&endpoint).and_then(|it| it.part).map(|(tag, _)| tag);
        let stream = self.streams.get(&endpoint);
        part.into_iter().chain(stream.into_iter().flat_map(Stream::tags)).collect()
    }

    /// Passes the next parts to the kernel. Returns the transfers that it refuses.
    pub(super) fn submit(
        &mut self,
        handle: &dyn Handle,
        memory: &Memory,
        tags: &mut u64,
    ) -> Vec<TransferEnd> {
        let mut refused = Vec::new();
        for pipe in self.pipes.values_mut().filter(|it| it.part.is_none()) {
            *tags += 1;
            if let Err(fault) = pipe.submit(handle, memory, *tags) {
                refused.push(TransferEnd { endpoint: pipe.transfer.endpoint, result: Err(fault) });
            }
        }
        for end in &refused {
            self.pipes.remove(&end.endpoint);
        }
        for stream in self.streams.values_mut() {
            refused.extend(stream.submit(handle, memory, tags));
        }
        refused
    }

    /// Takes the result of a URB. Returns the transfers that it ends.
    pub(super) fn end(&mut self, ended: &Ended, memory: &Memory) -> Vec<TransferEnd> {
        let mut streams = self.streams.values_mut();
        if let Some(ends) = streams.find_map(|stream| stream.end(ended, memory)) {
            return ends;
        }
        let mut pipes = self.pipes.iter_mut();
        let of = pipes.find(|(_, it)| it.part.is_some_and(|(tag, _)| tag == ended.tag));
        let Some((endpoint, pipe)) = of else { return Vec::new() };
        let endpoint = *endpoint;
        let Some(result) = pipe.end(ended, memory) else { return Vec::new() };
        self.pipes.remove(&endpoint);
        vec![TransferEnd { endpoint, result }]
    }
}

impl Pipe {
    fn submit(&mut self, handle: &dyn Handle, memory: &Memory, tag: u64) -> Result<(), Fault> {
        let length = (self.transfer.length - self.done).min(PART);
        let mut data = vec![0; length as usize];
        if !self.transfer.is_in() {
            let pieces = subrange(&self.transfer.pieces, self.done.into(), length.into());
            memory.gather(&pieces, &mut data).map_err(|_| Fault::Memory)?;
        }
        let endpoint = self.transfer.endpoint;
        let urb = Urb { kind: Kind::Bulk, endpoint, tag, data, packets: Vec::new() };
        // An endpoint that the device does not have, or the kernel lacks memory: the guest tries
        // again, as after any error on the bus.
        handle.submit(urb).map_err(|_| Fault::Gone)?;
        self.part = Some((tag, length));
        Ok(())
    }

    /// Returns the result of the whole transfer, if it has ended.
    fn end(&mut self, ended: &Ended, memory: &Memory) -> Option<Result<u32, Fault>> {
        let (_, length) = self.part.take()?;
        // A device that sends too much, or says so, is cut.
        let moved = u32::try_from(ended.moved).map_or(length, |it| it.min(length));
        if self.transfer.is_in() {
            let data = ended.data.get(..moved as usize).unwrap_or_default();
            let pieces = subrange(&self.transfer.pieces, self.done.into(), data.len() as u64);
            if memory.scatter(&pieces, data).is_err() {
                return Some(Err(Fault::Memory));
            }
        }
        self.done += moved;
        match ended.result {
            Ok(()) if moved == length && self.done < self.transfer.length && !self.stopped => None,
            Ok(()) | Err(Errno::REMOTEIO) => Some(Ok(self.done)),
            Err(Errno::PIPE) => Some(Err(Fault::Stall)),
            // Withdrawn by the guest. Data that the device has sent is not lost.
            Err(_) if self.stopped && self.transfer.is_in() && self.done > 0 => Some(Ok(self.done)),
            Err(_) if self.stopped => None,
            Err(_) => Some(Err(Fault::Gone)),
        }
    }
}
