//! Transfer rings (xHCI 4.10, 4.11.2, 4.11.5): from transfer descriptors to transfers, and back to
//! events.

use super::controller::Controller;
use super::endpoint::{self, Endpoint, State, Td};
use super::trb::{Code, DATA, EVENT_DATA, NO_OP, NORMAL, Ring, SETUP, STATUS, TRANSFER_EVENT, Trb};
use crate::usb::device::Device;
use crate::usb::{Done, Fault, Setup, Transfer};
use host::memory::{Memory, NoMemory, Piece};

/// Blocks of a descriptor: 16 MiB in pages.
const BLOCKS: usize = 4096;
/// Descriptors of an endpoint at a time.
const TURN: u32 = 64;
/// Blocks that a round looks at in all rings before it looks for a stop or a reset, links among
/// them: less than a millisecond. It ends the descriptor that it is in.
const ROUND: u32 = 1024;
/// Bytes that a block can carry itself.
const IMMEDIATE: u32 = 8;
/// Of a transfer event: its pointer is the data of an Event Data TRB.
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

impl Controller {
    /// Doorbells.
    pub(super) fn hear(&mut self, bells: &[(u8, u32)]) {
        for (slot, mask) in bells {
            let Some(slot) = self.slots.get_mut(slot) else { continue };
            for number in (1..32).filter(|number| mask >> number & 1 != 0) {
                let Some(endpoint) = slot.endpoints.get_mut(&number) else { continue };
                let stopped = endpoint.state == State::Stopped;
                if stopped || endpoint.state == State::Running {
                    (endpoint.state, endpoint.rung) = (State::Running, true);
                }
                if stopped {
                    slot.show(&self.shared.memory, number);
                }
            }
        }
    }

    /// Begins what is in the rings, up to a limit; true when there may be more.
    pub(super) fn transfers(&mut self) -> bool {
        let mut ready = Vec::new();
        for (slot, it) in &self.slots {
            let rung = it.endpoints.iter().filter(|(_, it)| it.rung && it.flight.is_none());
            ready.extend(rung.map(|(number, _)| (*slot, *number)));
        }
        // It goes on where the last round ended, so that every endpoint has its turn.
        let before = ready.partition_point(|it| *it <= self.last);
        ready.rotate_left(before);
        self.spent = 0;
        let mut more = false;
        for (slot, number) in ready {
            if self.spent >= ROUND {
                return true;
            }
            self.last = (slot, number);
            let mut turn = 0;
            while turn < TURN
                && self.spent < ROUND
                && !self.is_blocked()
                && self.transfer(slot, number)
            {
                self.flush();
                turn += 1;
            }
            more |= turn == TURN || self.spent >= ROUND;
        }
        more
    }

    fn endpoint(&mut self, slot: u8, number: u8) -> Option<&mut Endpoint> {
        self.slots.get_mut(&slot)?.endpoints.get_mut(&number)
    }

    /// Takes one descriptor; false when there is none that can be taken now.
    fn transfer(&mut self, slot: u8, number: u8) -> bool {
        let memory = self.shared.memory.clone();
        let Some(endpoint) = self.endpoint(slot, number) else { return false };
        if !endpoint.rung || endpoint.flight.is_some() || endpoint.state != State::Running {
            return false;
        }
        let ring = endpoint.ring;
        let parsed = parse(ring, &memory, &mut self.spent);
        let Some(endpoint) = self.endpoint(slot, number) else { return false };
        let td = match parsed {
            Ok(Some(td)) => td,
            Ok(None) => {
                endpoint.rung = false;
                return false;
            }
            Err(at) => {
                self.fail(slot, number, (at, Trb::default()), Code::Trb);
                return true;
            }
        };
        let first = td.trbs[0].1.kind();
        let tells_only = td.trbs.iter().all(|(_, trb)| trb.kind() == EVENT_DATA);
        if first == NO_OP || tells_only {
            self.end(slot, number, &td, Ok(0));
        } else if number == 1 {
            let result = self.stage(slot, &td);
            self.end(slot, number, &td, result);
        } else if is_data(&td, NORMAL) {
            self.begin(slot, number, td);
        } else {
            self.end(slot, number, &td, Err(Code::Trb));
        }
        true
    }

    /// Gives the device its transfer.
    fn begin(&mut self, slot: u8, number: u8, td: Td) {
        let transfer = Transfer {
            endpoint: endpoint::address(number),
            pieces: pieces(&td),
            length: td.length(),
        };
        let port = self.slots.get(&slot).and_then(|slot| slot.port);
        let Some(device) = port.and_then(|port| self.devices.get_mut(port)?.as_mut()) else {
            return self.end(slot, number, &td, Err(Code::Transaction));
        };
        if let Err(fault) = device.begin(transfer) {
            return self.end(slot, number, &td, Err(fault.into()));
        }
        let mut done = Vec::new();
        device.reap(&mut done);
        if let Some(endpoint) = self.endpoint(slot, number) {
            endpoint.flight = Some(td);
        }
        self.finish(port.unwrap_or(0), &done);
    }

    /// What the device at this port has done.
    pub(super) fn finish(&mut self, port: usize, done: &[Done]) {
        for done in done {
            let number = endpoint::number(done.endpoint);
            let slot = self.slots.iter().find(|(_, slot)| slot.port == Some(port));
            let Some(slot) = slot.map(|(number, _)| *number) else { return };
            let flight = self.endpoint(slot, number).and_then(|it| it.flight.take());
            if let Some(td) = flight {
                self.end(slot, number, &td, done.result.map_err(Code::from));
            }
        }
    }

    /// A stage of a control transfer.
    fn stage(&mut self, slot: u8, td: &Td) -> Result<u32, Code> {
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
                Ok(0)
            }
            DATA if is_data(td, DATA) => data_stage(endpoint, device, td, &memory),
            STATUS => {
                let setup = endpoint.setup.take().ok_or(Code::Trb)?;
                let mut data = std::mem::take(&mut endpoint.data);
                if !endpoint.answered {
                    device.control(setup, &mut data).map_err(|_| Code::Stall)?;
                }
                Ok(0)
            }
            _ => Err(Code::Trb),
        }
    }

    /// The end of a descriptor.
    fn end(&mut self, slot: u8, number: u8, td: &Td, result: Result<u32, Code>) {
        match result {
            Err(code) => self.fail(slot, number, td.trbs[0], code),
            Ok(moved) => {
                self.report(slot, number, td, moved);
                if let Some(endpoint) = self.endpoint(slot, number) {
                    endpoint.ring = td.next;
                }
            }
        }
    }

    fn fail(&mut self, slot: u8, number: u8, (at, trb): (u64, Trb), code: Code) {
        let mut event = Trb::event(TRANSFER_EVENT, code, at);
        event.status |= trb.length();
        event.control |= u32::from(slot) << 24 | u32::from(number) << 16;
        self.tell(trb.interrupter(), event);
        let Some(slot) = self.slots.get_mut(&slot) else { return };
        if let Some(endpoint) = slot.endpoints.get_mut(&number) {
            endpoint.state = if code == Code::Trb { State::Error } else { State::Halted };
            (endpoint.rung, endpoint.setup) = (false, None);
        }
        slot.show(&self.shared.memory, number);
    }

    /// The events of a descriptor that ended well, be it with less than there was room for.
    ///
    /// A short packet is told by the block in which it ended, if that asks for it (ISP), and by
    /// every later one that asks for an event, with the same rest (4.10.1.1.2): usually by two, of
    /// which drivers drop one. `sum` is the EDTLA (4.11.5.2), which begins anew with each
    /// descriptor.
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
            self.tell(trb.interrupter(), event);
        }
    }
}

/// The data of a control transfer: from the device at once, to the device with the status stage.
fn data_stage(
    endpoint: &mut Endpoint,
    device: &mut Device,
    td: &Td,
    memory: &Memory,
) -> Result<u32, Code> {
    let setup = endpoint.setup.filter(|_| !endpoint.answered).ok_or(Code::Trb)?;
    if setup.is_in() != td.trbs[0].1.is_in() || td.length() > u32::from(u16::MAX) {
        return Err(Code::Trb);
    }
    if setup.is_in() {
        let mut data = Vec::new();
        endpoint.answered = true;
        device.control(setup, &mut data).map_err(|_| Code::Stall)?;
        data.truncate(td.length() as usize);
        memory.scatter(&pieces(td), &data).map_err(|_| Code::DataBuffer)?;
        return Ok(u32::try_from(data.len()).unwrap_or(0));
    }
    let mut data = vec![0; td.length().min(setup.length.into()) as usize];
    memory.gather(&pieces(td), &mut data).map_err(|_| Code::DataBuffer)?;
    endpoint.data = data;
    Ok(td.length())
}

/// Whether a descriptor is made of buffers, the first of this kind.
fn is_data(td: &Td, kind: u32) -> bool {
    td.trbs[0].1.kind() == kind
        && td.trbs.iter().skip(1).all(|(_, trb)| matches!(trb.kind(), NORMAL | EVENT_DATA))
        && td.trbs.iter().all(|(_, trb)| !trb.is_immediate() || trb.length() <= IMMEDIATE)
}

fn pieces(td: &Td) -> Vec<Piece> {
    let filled = td.trbs.iter().filter(|(_, trb)| trb.length() > 0);
    let piece = |(at, trb): &(u64, Trb)| Piece {
        // What a block carries itself lies where the block does.
        address: if trb.is_immediate() { *at } else { trb.parameter },
        length: trb.length(),
    };
    filled.map(piece).collect()
}

/// Takes a whole descriptor from a ring, and counts the blocks that it looks at. None while the
/// guest has not filled all of it; where it lies, if it is none.
fn parse(ring: Ring, memory: &Memory, spent: &mut u32) -> Result<Option<Td>, u64> {
    let (mut next, mut trbs) = (ring, Vec::new());
    loop {
        match next.next(memory, spent) {
            Err(NoMemory) => return Err(next.at),
            Ok(None) => return Ok(None),
            Ok(Some((at, _))) if trbs.len() == BLOCKS => return Err(at),
            Ok(Some((at, trb))) => {
                trbs.push((at, trb));
                if !trb.is_chained() {
                    return Ok(Some(Td { trbs, next }));
                }
            }
        }
    }
}
