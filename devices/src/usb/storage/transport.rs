//! The transport (Bulk-Only Transport 1.0). The guest sends commands and data, and receives data
//! and the statuses of commands.
//!
//! Only one command is in progress at a time, as the transport specifies. A transfer counts when it
//! is complete. A canceled transfer leaves the command unchanged, and is done anew when the guest
//! submits it again.

use std::mem;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::bulk::{CBW, CSW, Command, Data, Parameters, Phase, Status};
use crate::scsi::{self, BlockTransfer, Cdb, Conditions, MediaEvent, Plan, Profile, Sense, Unit};
use crate::usb::{Fault, Transfer, TransferEnd};
use host::disk::{self, Channel, Drive, Operation, Request, wait};
use host::memory::{Memory, subrange};

/// The endpoint addresses.
pub(super) const IN: u8 = 0x81;
pub(super) const OUT: u8 = 0x02;

/// The maximum bytes per request to the medium, which bounds the time that it takes to stop.
const PART: u64 = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) conditions: Conditions,
    /// The medium was removed.
    pub(super) out: bool,
}

/// A transfer, or a command without data, that the medium is working on.
struct InFlight {
    /// The guest's transfer, if the command has data.
    transfer: Option<Transfer>,
    /// The bytes to move.
    total: u64,
    done: u64,
    /// A request for a part is in the channel.
    submitted: bool,
}

/// The state machine of the device. Both the guest and the operator act on it.
pub(super) struct Transport {
    pub(super) profile: Profile,
    pub(super) state: State,
    pub(super) medium: Option<Arc<Drive>>,
    /// `None` while parked.
    pub(super) memory: Option<Memory>,
    /// `None` while parked or without a medium.
    pub(super) channel: Option<Box<dyn Channel>>,
    incoming: Option<Transfer>,
    outgoing: Option<Transfer>,
    flight: Option<InFlight>,
    done: Vec<TransferEnd>,
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

    pub(super) fn begin(&mut self, transfer: Transfer) {
        let slot = if transfer.endpoint == IN { &mut self.incoming } else { &mut self.outgoing };
        *slot = Some(transfer);
        self.proceed();
    }

    pub(super) fn reap(&mut self, done: &mut Vec<TransferEnd>) {
        if self.reap_channel() {
            self.proceed();
        }
        done.append(&mut self.done);
    }

    /// If the transfer's data is in flight to or from the medium, it may complete instead.
    pub(super) fn cancel(&mut self, endpoint: u8) {
        self.quiesce();
        let is_it = |it: &Option<Transfer>| it.as_ref().is_some_and(|it| it.endpoint == endpoint);
        self.flight.take_if(|flight| is_it(&flight.transfer));
        self.incoming.take_if(|it| it.endpoint == endpoint);
        self.outgoing.take_if(|it| it.endpoint == endpoint);
        self.proceed();
    }

    /// Resets the guest's side to the state after power-on, and forgets its transfers.
    pub(super) fn reset(&mut self) {
        self.cancel_transfers();
        self.state.phase = Phase::Ready;
        self.state.conditions.reset();
    }

    /// Bulk-Only Mass Storage Reset (3.1): waits for a command again.
    pub(super) fn bulk_only_reset(&mut self) {
        self.quiesce();
        let flight = self.flight.take();
        self.state.phase = Phase::Ready;
        // A pending transfer stays pending.
        if let Some(transfer) = flight.and_then(|it| it.transfer) {
            self.begin(transfer);
        }
    }

    /// Stops all activity, and forgets all transfers that did not complete.
    pub(super) fn cancel_transfers(&mut self) {
        self.quiesce();
        (self.flight, self.incoming, self.outgoing) = (None, None, None);
    }

    /// A command that needs the medium fails.
    pub(super) fn remove_medium(&mut self) {
        self.quiesce();
        self.channel = None;
        if let Some(medium) = self.medium.take() {
            medium.watch(None);
        }
        let conditions = &mut self.state.conditions;
        (self.state.out, conditions.prevented, conditions.news) =
            (true, false, MediaEvent::Removal);
        if let Some(flight) = self.flight.take() {
            self.fail_transfer(flight.transfer, Sense::NO_MEDIUM);
        } else if matches!(&self.state.phase, Phase::Data(_, data) if data.needs_medium()) {
            let Phase::Data(command, _) = mem::take(&mut self.state.phase) else { return };
            self.fail(command, Sense::NO_MEDIUM);
        }
    }

    pub(super) fn proceed(&mut self) {
        loop {
            while self.flight.is_none() && self.memory.is_some() && self.step() {}
            if !self.submit() {
                return;
            }
        }
    }

    /// Returns false if it must wait for a transfer or for the medium.
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
                self.send_status(command, &transfer);
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
        self.done.push(TransferEnd { endpoint: transfer.endpoint, result });
    }

    /// Handles a transfer that should contain a command.
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

    fn unit<T>(&mut self, act: impl FnOnce(&mut Unit<'_>) -> T) -> T {
        let medium = self.medium.as_ref().map(|it| it.geometry());
        let (profile, conditions) = (&self.profile, &mut self.state.conditions);
        act(&mut Unit { profile, conditions, medium: medium.as_ref() })
    }

    /// The data that the command moves decides which of the thirteen cases applies (6.7).
    fn perform(&mut self, mut command: Command, cdb: &Cdb) {
        let planned = self.unit(|unit| unit.plan(cdb));
        let (need, inward) = match &planned {
            Ok(Plan::Answer(data)) => (data.len() as u64, true),
            Ok(Plan::Transfer(it)) => (it.length, !it.write),
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
        self.execute(command, planned, cdb);
    }

    fn execute(&mut self, command: Command, planned: Result<Plan, Sense>, cdb: &Cdb) {
        let data = match planned {
            Ok(Plan::Answer(data)) => Data::Answer(data),
            Ok(Plan::Transfer(it)) => Data::Move(it),
            Ok(Plan::Parameters(length)) => {
                Data::Parameters(Parameters { cdb: *cdb, length, received: Vec::new() })
            }
            Ok(Plan::Clear(operation, ranges)) => Data::Clear(operation, ranges),
            Ok(Plan::Flush) => Data::Flush,
            Ok(Plan::Eject) => {
                self.remove_medium();
                return self.close(command);
            }
            Ok(Plan::Done) => return self.close(command),
            Err(sense) => return self.fail(command, sense),
        };
        self.state.phase = Phase::Data(command, data);
    }

    /// Ends a command, apart from data that the guest still wants to send or receive.
    fn close(&mut self, command: Command) {
        self.state.phase = if command.remaining() > 0 {
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

    fn send_status(&mut self, command: Command, transfer: &Transfer) {
        let Some(memory) = &self.memory else { return };
        if transfer.length < CSW {
            // A status is never short. The guest must read it again.
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

    /// Returns false if it must wait for a transfer.
    fn data(&mut self, command: Command, data: Data) -> bool {
        let transfer = match &data {
            Data::Clear(..) | Data::Flush => {
                self.state.phase = Phase::Data(command, data);
                self.flight =
                    Some(InFlight { transfer: None, total: 0, done: 0, submitted: false });
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
            Data::Parameters(parameters) => self.receive(command, parameters, &transfer),
            Data::Move(it) => self.move_blocks(command, it, transfer),
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
            // A short packet ends the data.
            self.state.phase = Phase::Ended(command);
        } else {
            self.close(command);
        }
    }

    fn receive(&mut self, mut command: Command, mut parameters: Parameters, transfer: &Transfer) {
        let Some(memory) = &self.memory else { return };
        let left = parameters.length - parameters.received.len();
        let part = left.min(transfer.length as usize);
        let mut data = vec![0; part];
        if transfer.read(memory, &mut data).is_err() {
            self.end(transfer, Err(Fault::Memory));
            return self.fail(command, Sense::ABORTED);
        }
        self.end(transfer, Ok(transfer.length));
        command.advance(transfer.length.into(), part as u64);
        parameters.received.extend(data);
        if parameters.received.len() < parameters.length {
            self.state.phase = Phase::Data(command, Data::Parameters(parameters));
            return;
        }
        let Parameters { cdb, received, .. } = parameters;
        let planned = self.unit(|unit| unit.parameters(&cdb, &received));
        self.execute(command, planned, &cdb);
    }

    fn move_blocks(&mut self, mut command: Command, it: BlockTransfer, transfer: Transfer) {
        let total = it.length.min(transfer.length.into());
        let block = self.medium.as_ref().map_or(1, |it| u64::from(it.geometry().logical_block));
        if total < it.length && !total.is_multiple_of(block.max(1)) {
            // The transfer ends early, within a packet or within a block of the medium. Either the
            // guest sends less than it announced, or the data would not fit (babble).
            self.end(&transfer, Err(Fault::Stall));
            command.status = Status::PhaseError;
            self.state.phase = Phase::Ended(command);
            return;
        }
        self.state.phase = Phase::Data(command, Data::Move(it));
        if total == 0 {
            self.end(&transfer, Ok(0));
        } else if self.channel.is_none() {
            self.fail_transfer(Some(transfer), Sense::NO_MEDIUM);
        } else {
            self.flight =
                Some(InFlight { transfer: Some(transfer), total, done: 0, submitted: false });
        }
    }

    /// Returns true if the command has failed already.
    fn submit(&mut self) -> bool {
        let Some(flight) = self.flight.as_mut().filter(|it| !it.submitted) else { return false };
        let Phase::Data(_, data) = &self.state.phase else { return false };
        let Some(channel) = &mut self.channel else {
            let transfer = self.flight.take().and_then(|it| it.transfer);
            self.fail_transfer(transfer, Sense::NO_MEDIUM);
            return true;
        };
        flight.submitted = true;
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
                let pieces = subrange(&transfer.pieces, flight.done, length);
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

    /// Returns true if the request in flight has finished.
    fn reap_channel(&mut self) -> bool {
        let mut answers = Vec::new();
        if let Some(channel) = &mut self.channel {
            channel.reap(&mut answers);
        }
        let Some(answer) = answers.into_iter().find(|it| it.tag == self.tag) else { return false };
        let Some(mut flight) = self.flight.take_if(|it| it.submitted) else { return false };
        flight.submitted = false;
        let Phase::Data(command, data) = &mut self.state.phase else { return true };
        if let Err(fault) = answer.result {
            let write = !matches!(data, Data::Move(it) if !it.write);
            self.handle_fault(flight.transfer, fault, write);
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
                let rest = BlockTransfer {
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

    fn moved(
        &mut self,
        mut command: Command,
        rest: BlockTransfer,
        transfer: &Transfer,
        total: u64,
    ) {
        let length = u32::try_from(total).unwrap_or(u32::MAX);
        // Excess data from the guest counts as transferred. Unused room for data does not.
        let went = if rest.write { transfer.length } else { length };
        self.end(transfer, Ok(went));
        command.advance(went.into(), total);
        if rest.length > 0 {
            self.state.phase = Phase::Data(command, Data::Move(rest));
        } else if went < transfer.length {
            // A short packet ends the data.
            self.state.phase = Phase::Ended(command);
        } else {
            self.close(command);
        }
    }

    fn handle_fault(&mut self, transfer: Option<Transfer>, fault: disk::Fault, write: bool) {
        // The range in the medium was checked before, so the guest's buffer is invalid.
        if let (disk::Fault::Refused, Some(transfer)) = (fault, &transfer) {
            self.end(transfer, Err(Fault::Memory));
            let Phase::Data(command, _) = mem::take(&mut self.state.phase) else { return };
            return self.fail(command, Sense::ABORTED);
        }
        let sense = scsi::sense_for(fault, write);
        self.fail_transfer(transfer, sense);
    }

    /// Fails a command whose action is impossible, and refuses its transfer.
    fn fail_transfer(&mut self, transfer: Option<Transfer>, sense: Sense) {
        let Phase::Data(mut command, _) = mem::take(&mut self.state.phase) else { return };
        let Some(transfer) = transfer else { return self.fail(command, sense) };
        self.end(&transfer, Err(Fault::Stall));
        command.status = Status::Failed;
        self.state.conditions.fail(sense);
        self.state.phase = Phase::Ended(command);
    }

    /// Waits until the channel has no request of this device. Completed requests count, and nothing
    /// new begins.
    fn quiesce(&mut self) {
        while self.flight.as_ref().is_some_and(|it| it.submitted) {
            let Some(channel) = &mut self.channel else { return };
            // Repeated, because a request in flight may begin to wait for space or for its turn.
            let back = channel.withdraw();
            channel.submit();
            if back.iter().any(|it| it.tag == self.tag) {
                if let Some(flight) = &mut self.flight {
                    flight.submitted = false;
                }
            } else if !self.reap_channel()
                && let Some(channel) = &self.channel
            {
                wait(channel.as_ref());
            }
        }
    }
}

fn stalled(endpoint: u8) -> TransferEnd {
    TransferEnd { endpoint, result: Err(Fault::Stall) }
}
