//! Transfer rings (xHCI 4.10, 4.11.2, 4.11.5): turns transfer descriptors (TDs) into transfers, and
//! completed transfers into events.

use super::controller::Controller;
use super::endpoint::{self, Endpoint, State, Td};
use super::trb::{
    Code, DATA, EVENT_DATA, ISOCH, NO_OP, NORMAL, Ring, SETUP, STATUS, TRANSFER_EVENT, Trb,
};
use crate::usb::device::Device;
use crate::usb::{Fault, Progress, Setup, Transfer, TransferEnd};
use host::memory::{Memory, NoMemory, Piece};

/// The maximum number of TRBs per descriptor: enough for 16 MiB in pages.
const MAX_TRBS: usize = 4096;
/// The maximum number of TRBs per isochronous descriptor, of which many wait at a time.
const MAX_ISOCH_TRBS: usize = 64;
/// The maximum number of descriptors of one endpoint in a round.
const MAX_TURN: u32 = 64;
/// The number of TRBs, including links, that a round reads from all rings before it checks for a
/// stop or a reset. They take less than a millisecond. The last descriptor of a round is completed.
const MAX_ROUND: u32 = 1024;
/// The maximum number of bytes of immediate data.
const IMMEDIATE: u32 = 8;
/// The maximum length of an isochronous descriptor: 3 bursts of 16 packets.
const MAX_ISOCH: u32 = 3 * 16 * 1024;
/// A bit of transfer events (ED): the pointer is the data of an Event Data TRB.
const CARRIES_DATA: u32 = 1 << 2;

impl From<Fault> for Code {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Stall => Self::Stall,
            Fault::Memory => Self::DataBuffer,
            Fault::Gone => Self::Transaction,
        }
    }
}

#[derive(Clone, Copy)]
struct FailedTrb {
    at: u64,
    trb: Trb,
    code: Code,
}

impl Controller {
    /// Marks the endpoints whose doorbells were rung, and restarts stopped ones. Returns true if
    /// there were any.
    pub(super) fn ring_endpoints(&mut self) -> bool {
        // Doorbells wait while events do: their transfers cause more.
        if self.is_blocked() {
            return false;
        }
        let bells = self.shared.registers().take_bells();
        for (slot, mask) in &bells {
            let Some(slot) = self.slots.get_mut(slot) else { continue };
            for number in (1..32).filter(|number| mask >> number & 1 != 0) {
                let Some(endpoint) = slot.endpoints.get_mut(&number) else { continue };
                let stopped = endpoint.state == State::Stopped;
                if stopped || endpoint.state == State::Running {
                    (endpoint.state, endpoint.rung) = (State::Running, true);
                }
                if stopped {
                    slot.write_context(&self.shared.memory, number);
                }
            }
        }
        !bells.is_empty()
    }

    /// Begins the transfers in the rings, up to a limit. Returns true if there may be more.
    pub(super) fn transfers(&mut self) -> bool {
        let mut ready = Vec::new();
        for (slot, it) in &self.slots {
            let rung = it.endpoints.iter().filter(|(_, it)| it.rung && it.has_room());
            ready.extend(rung.map(|(number, _)| (*slot, *number)));
        }
        // Continues after the last endpoint of the last round, so that every endpoint has its turn.
        let before = ready.partition_point(|it| *it <= self.last);
        ready.rotate_left(before);
        self.spent = 0;
        let mut more = false;
        for (slot, number) in ready {
            if self.spent >= MAX_ROUND {
                return true;
            }
            self.last = (slot, number);
            let mut turn = 0;
            while turn < MAX_TURN
                && self.spent < MAX_ROUND
                && !self.is_blocked()
                && self.transfer(slot, number)
            {
                self.flush();
                turn += 1;
            }
            more |= turn == MAX_TURN || self.spent >= MAX_ROUND;
        }
        more
    }

    fn endpoint(&mut self, slot: u8, number: u8) -> Option<&mut Endpoint> {
        self.slots.get_mut(&slot)?.endpoints.get_mut(&number)
    }

    /// Returns false if no descriptor can be processed now.
    fn transfer(&mut self, slot: u8, number: u8) -> bool {
        let memory = self.shared.memory.clone();
        let Some(endpoint) = self.endpoint(slot, number) else { return false };
        if !endpoint.rung || !endpoint.has_room() || endpoint.state != State::Running {
            return false;
        }
        let (ring, kind) = (endpoint.position(), endpoint.data_kind());
        // Anything but data waits for the transfers before it.
        let waits = !endpoint.flights.is_empty();
        let parsed = parse(ring, &memory, &mut self.spent);
        let Some(endpoint) = self.endpoint(slot, number) else { return false };
        let td = match parsed {
            Ok(Some(td)) if waits && !is_data(&td, kind) => return false,
            Err(_) if waits => return false,
            Ok(Some(td)) => td,
            Ok(None) => {
                endpoint.rung = false;
                return false;
            }
            Err(at) => {
                self.fail(slot, number, FailedTrb { at, trb: Trb::default(), code: Code::Trb });
                return true;
            }
        };
        let first = td.trbs[0].1.kind();
        let has_no_data = td.trbs.iter().all(|(_, trb)| trb.kind() == EVENT_DATA);
        if first == NO_OP || has_no_data {
            self.end(slot, number, &td, Ok(0));
        } else if number == 1 {
            self.control(slot, td);
        } else if is_data(&td, kind)
            && (kind == NORMAL || td.length() <= MAX_ISOCH && td.trbs.len() <= MAX_ISOCH_TRBS)
        {
            self.begin(slot, number, td);
        } else {
            self.end(slot, number, &td, Err(Code::Trb));
        }
        true
    }

    /// Executes a stage of a control transfer. If the device has not answered yet, the descriptor
    /// is executed again later.
    fn control(&mut self, slot: u8, td: Td) {
        match self.stage(slot, &td).transpose() {
            Some(result) => self.end(slot, 1, &td, result),
            None => {
                if let Some(endpoint) = self.endpoint(slot, 1) {
                    endpoint.flights.push_back(td);
                }
            }
        }
    }

    fn begin(&mut self, slot: u8, number: u8, td: Td) {
        let transfer = Transfer {
            endpoint: endpoint::address(number),
            pieces: pieces(&td),
            length: td.length(),
            is_isochronous: td.trbs[0].1.kind() == ISOCH,
        };
        let port = self.slots.get(&slot).and_then(|slot| slot.port);
        let Some(device) = port.and_then(|port| self.devices.get_mut(port)?.as_mut()) else {
            return self.end(slot, number, &td, Err(Code::Transaction));
        };
        let batches = transfer.is_isochronous;
        if let Err(fault) = device.begin(transfer) {
            return self.end(slot, number, &td, Err(fault.into()));
        }
        let mut done = Vec::new();
        // Isochronous transfers begin together, in the next round.
        if !batches {
            device.reap(&mut done);
        }
        if let Some(endpoint) = self.endpoint(slot, number) {
            endpoint.flights.push_back(td);
        }
        self.finish(port.unwrap_or(0), &done);
    }

    pub(super) fn finish(&mut self, port: usize, done: &[TransferEnd]) {
        for done in done {
            let number = endpoint::number(done.endpoint);
            let slot = self.slots.iter().find(|(_, slot)| slot.port == Some(port));
            let Some(slot) = slot.map(|(number, _)| *number) else { return };
            let flight = self.endpoint(slot, number).and_then(|it| it.flights.pop_front());
            match flight {
                Some(td) if number == 1 && done.result.is_ok() => self.control(slot, td),
                Some(td) => self.end(slot, number, &td, done.result.map_err(Code::from)),
                None => {}
            }
        }
    }

    /// Returns `None` while the device has not answered.
    fn stage(&mut self, slot: u8, td: &Td) -> Result<Option<u32>, Code> {
        let memory = self.shared.memory.clone();
        let it = self.slots.get_mut(&slot).ok_or(Code::Trb)?;
        let endpoint = it.endpoints.get_mut(&1).ok_or(Code::Trb)?;
        let device = it.port.and_then(|port| self.devices.get_mut(port)?.as_mut());
        let device = device.ok_or(Code::Transaction)?;
        let (_, trb) = td.trbs[0];
        match trb.kind() {
            SETUP if trb.is_immediate() && trb.status & 0x1_ffff == IMMEDIATE => {
                endpoint.setup = Some(Setup::new(trb.parameter.to_le_bytes()));
                (endpoint.answered, endpoint.data) = (false, Vec::new());
                Ok(Some(0))
            }
            DATA if is_data(td, DATA) => data_stage(endpoint, device, td, &memory),
            STATUS => {
                let setup = endpoint.setup.ok_or(Code::Trb)?;
                if !endpoint.answered {
                    let progress = device.control(setup, &mut endpoint.data);
                    if progress.map_err(|_| Code::Stall)? == Progress::Pending {
                        return Ok(None);
                    }
                }
                (endpoint.setup, endpoint.data) = (None, Vec::new());
                Ok(Some(0))
            }
            _ => Err(Code::Trb),
        }
    }

    fn end(&mut self, slot: u8, number: u8, td: &Td, result: Result<u32, Code>) {
        match result {
            // The intervals go on.
            Err(code) if td.trbs[0].1.kind() == ISOCH => {
                let (at, trb) = td.trbs[0];
                self.push_error(slot, number, FailedTrb { at, trb, code });
                if let Some(endpoint) = self.endpoint(slot, number) {
                    endpoint.ring = td.next;
                }
            }
            Err(code) => {
                let (at, trb) = td.trbs[0];
                self.fail(slot, number, FailedTrb { at, trb, code });
            }
            Ok(moved) => {
                self.report(slot, number, td, moved);
                if let Some(endpoint) = self.endpoint(slot, number) {
                    endpoint.ring = td.next;
                }
            }
        }
    }

    fn fail(&mut self, slot: u8, number: u8, failed: FailedTrb) {
        self.push_error(slot, number, failed);
        let FailedTrb { code, .. } = failed;
        let Some(slot) = self.slots.get_mut(&slot) else { return };
        if let Some(endpoint) = slot.endpoints.get_mut(&number) {
            endpoint.state = if code == Code::Trb { State::Error } else { State::Halted };
            (endpoint.rung, endpoint.setup) = (false, None);
        }
        slot.write_context(&self.shared.memory, number);
    }

    fn push_error(&mut self, slot: u8, number: u8, failed: FailedTrb) {
        let FailedTrb { at, trb, code } = failed;
        let mut event = Trb::event(TRANSFER_EVENT, code, at);
        event.status |= trb.length();
        event.control |= u32::from(slot) << 24 | u32::from(number) << 16;
        self.push_event(trb.interrupter(), event);
    }

    /// Queues the events of a descriptor that completed, perhaps with a short packet.
    ///
    /// A short packet is reported for the TRB in which it ended, if that TRB requests it (ISP), and
    /// for every later TRB that requests an event, with the same residue (4.10.1.1.2). Usually
    /// these are two events, of which drivers drop one. `sum` is the EDTLA (4.11.5.2), which begins
    /// anew with each descriptor.
    fn report(&mut self, slot: u8, number: u8, td: &Td, moved: u32) {
        let (mut left, mut sum, mut short) = (moved, 0_u32, None);
        for (at, trb) in &td.trbs {
            let got = trb.length().min(left);
            left -= got;
            sum = sum.wrapping_add(got);
            let ends_here = short.is_none() && got < trb.length();
            short = short.or(ends_here.then(|| trb.length() - got));
            if !(trb.wants_event() || ends_here && trb.wants_short()) {
                continue;
            }
            let code = if short.is_some() { Code::ShortPacket } else { Code::Success };
            let mut event = Trb::event(TRANSFER_EVENT, code, *at);
            event.control |= u32::from(slot) << 24 | u32::from(number) << 16;
            if trb.kind() == EVENT_DATA {
                event.parameter = trb.parameter;
                event.control |= CARRIES_DATA;
                event.status |= std::mem::take(&mut sum) & 0xff_ffff;
            } else {
                event.status |= short.unwrap_or(0);
            }
            self.push_event(trb.interrupter(), event);
        }
    }
}

/// Executes a data stage. Data from the device is transferred at once. Data to the device is kept
/// until the status stage.
fn data_stage(
    endpoint: &mut Endpoint,
    device: &mut Device,
    td: &Td,
    memory: &Memory,
) -> Result<Option<u32>, Code> {
    let setup = endpoint.setup.filter(|_| !endpoint.answered).ok_or(Code::Trb)?;
    if setup.is_in() != td.trbs[0].1.is_in() || td.length() > u32::from(u16::MAX) {
        return Err(Code::Trb);
    }
    if setup.is_in() {
        let mut data = Vec::new();
        if device.control(setup, &mut data).map_err(|_| Code::Stall)? == Progress::Pending {
            return Ok(None);
        }
        endpoint.answered = true;
        data.truncate(td.length() as usize);
        memory.scatter(&pieces(td), &data).map_err(|_| Code::DataBuffer)?;
        return Ok(Some(u32::try_from(data.len()).unwrap_or(0)));
    }
    let mut data = vec![0; td.length().min(setup.length.into()) as usize];
    memory.gather(&pieces(td), &mut data).map_err(|_| Code::DataBuffer)?;
    endpoint.data = data;
    Ok(Some(td.length()))
}

/// Whether a descriptor consists of data TRBs, the first of this type.
fn is_data(td: &Td, kind: u32) -> bool {
    td.trbs[0].1.kind() == kind
        && td.trbs.iter().skip(1).all(|(_, trb)| matches!(trb.kind(), NORMAL | EVENT_DATA))
        && td.trbs.iter().all(|(_, trb)| !trb.is_immediate() || trb.length() <= IMMEDIATE)
}

fn pieces(td: &Td) -> Vec<Piece> {
    let filled = td.trbs.iter().filter(|(_, trb)| trb.length() > 0);
    let piece = |(at, trb): &(u64, Trb)| Piece {
        // Immediate data is in the TRB itself.
        address: if trb.is_immediate() { *at } else { trb.parameter },
        length: trb.length(),
    };
    filled.map(piece).collect()
}

/// Takes a whole descriptor from a ring, and adds the number of TRBs that were read to `spent`.
/// Returns `None` while the guest has not filled all of it. The error is the address of a TRB that
/// is invalid.
fn parse(ring: Ring, memory: &Memory, spent: &mut u32) -> Result<Option<Td>, u64> {
    let (mut next, mut trbs) = (ring, Vec::new());
    loop {
        match next.next(memory, spent) {
            Err(NoMemory) => return Err(next.at),
            Ok(None) => return Ok(None),
            Ok(Some((at, _))) if trbs.len() == MAX_TRBS => return Err(at),
            Ok(Some((at, trb))) => {
                trbs.push((at, trb));
                if !trb.is_chained() {
                    return Ok(Some(Td { trbs, next }));
                }
            }
        }
    }
}
