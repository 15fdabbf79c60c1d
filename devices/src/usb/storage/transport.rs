//! The transport (Bulk-Only Transport 1.0): what comes out of the guest is a command, data, or
//! nothing that has a meaning; what goes in is data, or how a command ended.
//!
//! One thing is under way at a time, as the transport has it. A transfer counts when it is over:
//! one that is taken back leaves the command where it was, and is done again when it comes again.

use std::mem;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::bulk::{CBW, CSW, Command, Data, Phase, Status};
use crate::scsi::{self, Cdb, Conditions, Move, News, Plan, Profile, Sense, Unit};
use crate::usb::{Done, Fault, Transfer};
use host::disk::{self, Channel, Drive, Operation, Request, wait};
use host::memory::{Memory, part};

/// The endpoints.
pub(super) const IN: u8 = 0x81;
pub(super) const OUT: u8 = 0x02;

/// Bytes that are asked of the medium at once: so long may it take to stop.
const PART: u64 = 1 << 20;

/// What of it changes, as it is saved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) conditions: Conditions,
    /// The medium was taken out.
    pub(super) out: bool,
}

/// Something that the medium does.
struct Flight {
    /// For whom, if a guest waits with a transfer.
    transfer: Option<Transfer>,
    /// Bytes to move, and those that did.
    total: u64,
    done: u64,
    /// The channel has a part of it.
    asked: bool,
}

/// The device, between its guest and its operator.
pub(super) struct Transport {
    pub(super) profile: Profile,
    pub(super) state: State,
    pub(super) medium: Option<Arc<Drive>>,
    /// While it runs.
    pub(super) memory: Option<Memory>,
    /// While it runs and has a medium.
    pub(super) channel: Option<Box<dyn Channel>>,
    /// What the guest waits with.
    incoming: Option<Transfer>,
    outgoing: Option<Transfer>,
    flight: Option<Flight>,
    done: Vec<Done>,
    tag: u64,
}

impl Transport {
    pub(super) fn new(profile: Profile, medium: Option<Arc<Drive>>) -> Self {
        Self {
            profile,
            state: State::default(),
            medium,
            memory: None,
            channel: None,
            incoming: None,
            outgoing: None,
            flight: None,
            done: Vec::new(),
            tag: 0,
        }
    }

    /// Takes a transfer.
    pub(super) fn begin(&mut self, transfer: Transfer) {
        let slot = if transfer.endpoint == IN { &mut self.incoming } else { &mut self.outgoing };
        *slot = Some(transfer);
        self.proceed();
    }

    /// What is over.
    pub(super) fn reap(&mut self, done: &mut Vec<Done>) {
        if self.heed() {
            self.proceed();
        }
        done.append(&mut self.done);
    }

    /// Takes a transfer back. One whose data is on its way to or from the medium may end instead.
    pub(super) fn cancel(&mut self, endpoint: u8) {
        self.still();
        let of = |it: &Option<Transfer>| it.as_ref().is_some_and(|it| it.endpoint == endpoint);
        self.flight.take_if(|flight| of(&flight.transfer));
        self.incoming.take_if(|it| it.endpoint == endpoint);
        self.outgoing.take_if(|it| it.endpoint == endpoint);
        self.proceed();
    }

    /// As after power-on for the guest, with its transfers gone.
    pub(super) fn reset(&mut self) {
        self.forget();
        self.state.phase = Phase::Ready;
        self.state.conditions.reset();
    }

    /// Bulk-Only Mass Storage Reset (3.1): the next that comes is a command.
    pub(super) fn recover(&mut self) {
        self.still();
        let flight = self.flight.take();
        self.state.phase = Phase::Ready;
        // Who waits goes on waiting.
        if let Some(transfer) = flight.and_then(|it| it.transfer) {
            self.begin(transfer);
        }
    }

    /// Nothing is under way after this, and all transfers that did not end are forgotten.
    pub(super) fn forget(&mut self) {
        self.still();
        (self.flight, self.incoming, self.outgoing) = (None, None, None);
    }

    /// Takes the medium out; what was about it fails.
    pub(super) fn take_out(&mut self) {
        self.still();
        self.channel = None;
        if let Some(medium) = self.medium.take() {
            medium.watch(None);
        }
        let conditions = &mut self.state.conditions;
        (self.state.out, conditions.prevented, conditions.news) = (true, false, News::Removal);
        if let Some(flight) = self.flight.take() {
            self.lose(flight.transfer, Sense::NO_MEDIUM);
        } else if matches!(&self.state.phase, Phase::Data(_, data) if data.is_of_the_medium()) {
            let Phase::Data(command, _) = mem::take(&mut self.state.phase) else { return };
            self.fail(command, Sense::NO_MEDIUM);
        }
    }

    /// Goes on as far as it can.
    pub(super) fn proceed(&mut self) {
        loop {
            while self.flight.is_none() && self.memory.is_some() && self.step() {}
            if !self.ask() {
                return;
            }
        }
    }

    /// One step; false when somebody has to come first.
    fn step(&mut self) -> bool {
        match mem::take(&mut self.state.phase) {
            Phase::Ready => {
                let Some(transfer) = self.outgoing.take() else { return false };
                self.command(&transfer);
            }
            Phase::Ended(command) => {
                let Some(transfer) = self.incoming.take() else {
                    self.state.phase = Phase::Ended(command);
                    return false;
                };
                self.tell(command, &transfer);
            }
            Phase::Broken => {
                self.state.phase = Phase::Broken;
                let waiting = [self.incoming.take(), self.outgoing.take()];
                let waiting = waiting.into_iter().flatten();
                self.done.extend(waiting.map(|it| stalled(it.endpoint)));
                return false;
            }
            Phase::Data(command, data) => return self.data(command, data),
        }
        true
    }

    fn end(&mut self, transfer: &Transfer, result: Result<u32, Fault>) {
        self.done.push(Done { endpoint: transfer.endpoint, result });
    }

    /// A command, or what comes in its place.
    fn command(&mut self, transfer: &Transfer) {
        let mut bytes = [0; CBW as usize];
        let read = match &self.memory {
            Some(memory) if transfer.length == CBW => transfer.read(memory, &mut bytes),
            _ => Ok(()),
        };
        if read.is_err() {
            return self.end(transfer, Err(Fault::Memory));
        }
        let Some((command, cdb)) = Command::read(&bytes) else {
            self.state.phase = Phase::Broken;
            return self.end(transfer, Err(Fault::Stall));
        };
        self.end(transfer, Ok(CBW));
        self.perform(command, &cdb);
    }

    fn unit<T>(&mut self, ask: impl FnOnce(&mut Unit<'_>) -> T) -> T {
        let medium = self.medium.as_ref().map(|it| it.geometry());
        let (profile, conditions) = (&self.profile, &mut self.state.conditions);
        ask(&mut Unit { profile, conditions, medium: medium.as_ref() })
    }

    /// Begins a command: what it is about to move decides which of the thirteen cases it is (6.7).
    fn perform(&mut self, mut command: Command, cdb: &Cdb) {
        let planned = self.unit(|unit| unit.plan(cdb));
        let (need, inward) = match &planned {
            Ok(Plan::Answer(data)) => (data.len() as u64, true),
            Ok(Plan::Move(it)) => (it.length, !it.write),
            Ok(Plan::Parameters(length)) => (*length as u64, false),
            Ok(Plan::Done | Plan::Clear(..) | Plan::Flush | Plan::Eject) | Err(_) => {
                (0, command.is_in)
            }
        };
        let wanted = u64::from(command.wanted);
        if need > 0 && (need > wanted || inward != command.is_in) {
            // Cases 2, 3, 7, 8, 10 and 13: nothing is done.
            command.status = Status::PhaseError;
            return self.close(command);
        }
        self.follow(command, planned, cdb);
    }

    /// Goes by a plan.
    fn follow(&mut self, command: Command, planned: Result<Plan, Sense>, cdb: &Cdb) {
        let data = match planned {
            Ok(Plan::Answer(data)) => Data::Answer(data),
            Ok(Plan::Move(it)) => Data::Move(it),
            Ok(Plan::Parameters(length)) => Data::Parameters(*cdb, length, Vec::new()),
            Ok(Plan::Clear(operation, ranges)) => Data::Clear(operation, ranges),
            Ok(Plan::Flush) => Data::Flush,
            Ok(Plan::Eject) => {
                self.take_out();
                return self.close(command);
            }
            Ok(Plan::Done) => return self.close(command),
            Err(sense) => return self.fail(command, sense),
        };
        self.state.phase = Phase::Data(command, data);
    }

    /// The command is over but for the data that its guest still has or wants.
    fn close(&mut self, command: Command) {
        self.state.phase = if command.left() > 0 {
            Phase::Data(command, Data::Refuse)
        } else {
            Phase::Ended(command)
        };
    }

    fn fail(&mut self, mut command: Command, sense: Sense) {
        command.status = Status::Failed;
        self.state.conditions.fail(sense);
        self.close(command);
    }

    /// How it ended.
    fn tell(&mut self, command: Command, transfer: &Transfer) {
        let Some(memory) = &self.memory else { return };
        if transfer.length < CSW {
            // There is no short status: the guest has to look for it again.
            self.state.phase = Phase::Ended(command);
            return self.end(transfer, Err(Fault::Stall));
        }
        match transfer.write(memory, &command.end()) {
            Ok(length) => self.end(transfer, Ok(length)),
            Err(_) => {
                self.state.phase = Phase::Ended(command);
                self.end(transfer, Err(Fault::Memory));
            }
        }
    }

    /// A step of what a command does. False when a transfer has to come first.
    fn data(&mut self, command: Command, data: Data) -> bool {
        let transfer = match &data {
            Data::Clear(..) | Data::Flush => {
                self.state.phase = Phase::Data(command, data);
                self.flight = Some(Flight { transfer: None, total: 0, done: 0, asked: false });
                return true;
            }
            _ if command.is_in => self.incoming.take(),
            _ => self.outgoing.take(),
        };
        let Some(transfer) = transfer else {
            self.state.phase = Phase::Data(command, data);
            return false;
        };
        match data {
            Data::Answer(rest) => self.answer(command, rest, &transfer),
            Data::Parameters(cdb, length, have) => {
                self.gather(command, (cdb, length, have), &transfer);
            }
            Data::Move(it) => self.carry(command, it, transfer),
            _ => {
                self.state.phase = Phase::Ended(command);
                self.end(&transfer, Err(Fault::Stall));
            }
        }
        true
    }

    fn answer(&mut self, mut command: Command, mut rest: Vec<u8>, transfer: &Transfer) {
        let Some(memory) = &self.memory else { return };
        let Ok(length) = transfer.write(memory, &rest) else {
            self.end(transfer, Err(Fault::Memory));
            return self.fail(command, Sense::ABORTED);
        };
        self.end(transfer, Ok(length));
        rest.drain(..length as usize);
        command.advance(length.into(), length.into());
        if !rest.is_empty() {
            self.state.phase = Phase::Data(command, Data::Answer(rest));
        } else if length < transfer.length {
            // A short packet: the guest knows that nothing else comes.
            self.state.phase = Phase::Ended(command);
        } else {
            self.close(command);
        }
    }

    /// Parameters come.
    fn gather(
        &mut self,
        mut command: Command,
        (cdb, length, mut have): (Cdb, usize, Vec<u8>),
        transfer: &Transfer,
    ) {
        let Some(memory) = &self.memory else { return };
        let part = (length - have.len()).min(transfer.length as usize);
        let mut data = vec![0; part];
        if transfer.read(memory, &mut data).is_err() {
            self.end(transfer, Err(Fault::Memory));
            return self.fail(command, Sense::ABORTED);
        }
        self.end(transfer, Ok(transfer.length));
        command.advance(transfer.length.into(), part as u64);
        have.extend(data);
        if have.len() < length {
            self.state.phase = Phase::Data(command, Data::Parameters(cdb, length, have));
            return;
        }
        let planned = self.unit(|unit| unit.parameters(&cdb, &have));
        self.follow(command, planned, &cdb);
    }

    /// Blocks go from the medium into a transfer, or the other way.
    fn carry(&mut self, mut command: Command, it: Move, transfer: Transfer) {
        let total = it.length.min(transfer.length.into());
        let block = self.medium.as_ref().map_or(1, |it| u64::from(it.geometry().logical_block));
        if total < it.length && !total.is_multiple_of(block.max(1)) {
            // It ends within a packet, or within a block of the medium, before its time: from the
            // guest that is less than it promised, and to it more than fits (babble).
            self.end(&transfer, Err(Fault::Stall));
            command.status = Status::PhaseError;
            self.state.phase = Phase::Ended(command);
            return;
        }
        self.state.phase = Phase::Data(command, Data::Move(it));
        if total == 0 {
            self.end(&transfer, Ok(0));
        } else if self.channel.is_none() {
            self.lose(Some(transfer), Sense::NO_MEDIUM);
        } else {
            self.flight = Some(Flight { transfer: Some(transfer), total, done: 0, asked: false });
        }
    }

    /// Asks the medium for the next part of what is under way. True when that is over already.
    fn ask(&mut self) -> bool {
        let Some(flight) = self.flight.as_mut().filter(|it| !it.asked) else { return false };
        let Phase::Data(_, data) = &self.state.phase else { return false };
        let Some(channel) = &mut self.channel else {
            let transfer = self.flight.take().and_then(|it| it.transfer);
            self.lose(transfer, Sense::NO_MEDIUM);
            return true;
        };
        flight.asked = true;
        self.tag += 1;
        let tag = self.tag;
        let plain = |operation, (offset, length)| {
            let pieces = Vec::new();
            Request { tag, operation, offset, length, pieces }
        };
        channel.push(match (data, &flight.transfer) {
            (Data::Move(it), Some(transfer)) => {
                let length = PART.min(flight.total - flight.done);
                let operation = if it.write {
                    Operation::Write { durable: it.durable }
                } else {
                    Operation::Read
                };
                let pieces = part(&transfer.pieces, flight.done, length);
                Request { tag, operation, offset: it.offset + flight.done, length, pieces }
            }
            (Data::Clear(operation, ranges), _) => {
                plain(*operation, ranges.last().copied().unwrap_or_default())
            }
            _ => plain(Operation::Flush, (0, 0)),
        });
        channel.submit();
        false
    }

    /// What the medium did. True when something ended.
    fn heed(&mut self) -> bool {
        let mut answers = Vec::new();
        if let Some(channel) = &mut self.channel {
            channel.reap(&mut answers);
        }
        let Some(answer) = answers.into_iter().find(|it| it.tag == self.tag) else { return false };
        let Some(mut flight) = self.flight.take_if(|it| it.asked) else { return false };
        flight.asked = false;
        let Phase::Data(command, data) = &mut self.state.phase else { return true };
        if let Err(fault) = answer.result {
            let write = !matches!(data, Data::Move(it) if !it.write);
            self.broken(flight.transfer, fault, write);
            return true;
        }
        match (data, flight.transfer.take()) {
            (Data::Move(it), Some(transfer)) => {
                flight.done += PART.min(flight.total - flight.done);
                if flight.done < flight.total {
                    flight.transfer = Some(transfer);
                    self.flight = Some(flight);
                    return true;
                }
                let command = command.clone();
                let rest = Move {
                    offset: it.offset + flight.total,
                    length: it.length - flight.total,
                    ..*it
                };
                self.moved(command, rest, &transfer, flight.total);
            }
            (Data::Clear(_, ranges), _) if ranges.len() > 1 => drop(ranges.pop()),
            _ => {
                let command = command.clone();
                self.close(command);
            }
        }
        true
    }

    /// A transfer has its data, or gave it.
    fn moved(&mut self, mut command: Command, rest: Move, transfer: &Transfer, total: u64) {
        let length = u32::try_from(total).unwrap_or(u32::MAX);
        // What the guest sent and nobody wanted went too; what it had room for did not.
        let went = if rest.write { transfer.length } else { length };
        self.end(transfer, Ok(went));
        command.advance(went.into(), total);
        if rest.length > 0 {
            self.state.phase = Phase::Data(command, Data::Move(rest));
        } else if went < transfer.length {
            // A short packet: the guest knows that nothing else comes.
            self.state.phase = Phase::Ended(command);
        } else {
            self.close(command);
        }
    }

    /// The medium, or the guest's memory, did not do.
    fn broken(&mut self, transfer: Option<Transfer>, fault: disk::Fault, write: bool) {
        // What lies within the medium was checked: it is the guest's memory.
        if let (disk::Fault::Refused, Some(transfer)) = (fault, &transfer) {
            self.end(transfer, Err(Fault::Memory));
            let Phase::Data(command, _) = mem::take(&mut self.state.phase) else { return };
            return self.fail(command, Sense::ABORTED);
        }
        let sense = scsi::fault(fault, write);
        self.lose(transfer, sense);
    }

    /// What the command is about cannot be: its transfer is refused, and it failed.
    fn lose(&mut self, transfer: Option<Transfer>, sense: Sense) {
        let Phase::Data(mut command, _) = mem::take(&mut self.state.phase) else { return };
        let Some(transfer) = transfer else { return self.fail(command, sense) };
        self.end(&transfer, Err(Fault::Stall));
        command.status = Status::Failed;
        self.state.conditions.fail(sense);
        self.state.phase = Phase::Ended(command);
    }

    /// Waits until the channel has nothing of ours. What it did counts, and nothing new begins.
    fn still(&mut self) {
        while self.flight.as_ref().is_some_and(|it| it.asked) {
            let Some(channel) = &mut self.channel else { return };
            // Each time: what is under way may come to wait for room, or for its turn.
            let back = channel.withdraw();
            channel.submit();
            if back.iter().any(|it| it.tag == self.tag) {
                if let Some(flight) = &mut self.flight {
                    flight.asked = false;
                }
            } else if !self.heed()
                && let Some(channel) = &self.channel
            {
                wait(channel.as_ref());
            }
        }
    }
}

fn stalled(endpoint: u8) -> Done {
    Done { endpoint, result: Err(Fault::Stall) }
}
