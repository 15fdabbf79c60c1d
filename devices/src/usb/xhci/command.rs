//! The command ring (xHCI 4.6).

use super::context::{ADDRESSED, CONFIGURED, CONTEXTS, Context, DEFAULT, Input};
use super::controller::Controller;
use super::endpoint::{Endpoint, Slot, State, Td};
use super::registers::SLOTS;
use super::trb::{COMMAND_COMPLETION, Code, Ring, TRANSFER_EVENT, Trb};
use super::{context, endpoint};
use host::memory::NoMemory;

/// The maximum number of commands per round. Resets are handled between rounds.
const COMMANDS: u32 = 32;

/// Command TRB types.
const ENABLE_SLOT: u32 = 9;
const DISABLE_SLOT: u32 = 10;
const ADDRESS_DEVICE: u32 = 11;
const CONFIGURE_ENDPOINT: u32 = 12;
const EVALUATE_CONTEXT: u32 = 13;
const RESET_ENDPOINT: u32 = 14;
const STOP_ENDPOINT: u32 = 15;
const SET_DEQUEUE: u32 = 16;
const RESET_DEVICE: u32 = 17;
const NO_OP_COMMAND: u32 = 23;

/// Block Set Address Request of Address Device, and Deconfigure of Configure Endpoint.
const BLOCK: u32 = 1 << 9;
const DECONFIGURE: u32 = 1 << 9;

impl From<NoMemory> for Code {
    fn from(_: NoMemory) -> Self {
        Self::Parameter
    }
}

type Outcome = Result<(), Code>;

impl Controller {
    /// Returns true if there may be more.
    pub(super) fn commands(&mut self) -> bool {
        for _ in 0..COMMANDS {
            let (mut ring, run) = {
                let registers = self.shared.registers();
                (registers.commands, registers.commands_run)
            };
            if !run || self.is_blocked() {
                return false;
            }
            match ring.next(&self.shared.memory, &mut 0) {
                // A ring outside of memory has no commands.
                Ok(None) | Err(NoMemory) => return false,
                Ok(Some((at, trb))) => {
                    // A doorbell that was rung before the command was written comes first: an
                    // endpoint that it starts can be stopped.
                    self.ring_endpoints();
                    self.shared.registers().commands = ring;
                    self.command(at, trb);
                    self.flush();
                }
            }
        }
        true
    }

    /// Command Stop or Abort. No command is in progress at this time, because each is executed at
    /// once.
    pub(super) fn stop_commands(&mut self) -> bool {
        let mut registers = self.shared.registers();
        registers.commands_run = false;
        let event = Trb::event(COMMAND_COMPLETION, Code::CommandRingStopped, registers.commands.at);
        registers.push(0, event);
        true
    }

    fn command(&mut self, at: u64, trb: Trb) {
        let [_, _, high, named] = trb.control.to_le_bytes();
        let mut slot = named;
        let number = high & 0x1f;
        let outcome = match trb.kind() {
            ENABLE_SLOT => self.enable_slot().map(|enabled| slot = enabled),
            DISABLE_SLOT => self.disable_slot(slot),
            ADDRESS_DEVICE => self.address_device(slot, trb),
            CONFIGURE_ENDPOINT if trb.control & DECONFIGURE != 0 => self.deconfigure(slot),
            CONFIGURE_ENDPOINT => self.configure(slot, trb.parameter),
            EVALUATE_CONTEXT => self.evaluate(slot, trb.parameter),
            RESET_ENDPOINT => self.reset_endpoint(slot, number),
            STOP_ENDPOINT => self.stop_endpoint(slot, number),
            SET_DEQUEUE => self.set_dequeue(slot, number, trb),
            RESET_DEVICE => self.reset_device(slot),
            NO_OP_COMMAND => Ok(()),
            // Virtualization, bandwidth, latencies: not supported.
            _ => Err(Code::Trb),
        };
        let code = outcome.err().unwrap_or(Code::Success);
        let mut event = Trb::event(COMMAND_COMPLETION, code, at);
        event.control |= u32::from(slot) << 24;
        self.push_event(0, event);
    }

    fn slot(&mut self, number: u8) -> Result<&mut Slot, Code> {
        self.slots.get_mut(&number).ok_or(Code::SlotNotEnabled)
    }

    fn enable_slot(&mut self) -> Result<u8, Code> {
        let [max, ..] = self.shared.registers().config.to_le_bytes();
        let free = (1..=max.min(SLOTS)).find(|number| !self.slots.contains_key(number));
        let number = free.ok_or(Code::NoSlots)?;
        self.slots.insert(number, Slot::default());
        Ok(number)
    }

    fn disable_slot(&mut self, number: u8) -> Outcome {
        self.slot(number)?;
        self.withdraw_all(number, 1);
        let mut slot = self.slots.remove(&number).ok_or(Code::SlotNotEnabled)?;
        // A slot that was never addressed has no context.
        if slot.state > 0 {
            slot.state = 0;
            slot.write_slot_context(&self.shared.memory, number);
        }
        Ok(())
    }

    fn address_device(&mut self, number: u8, trb: Trb) -> Outcome {
        let block = trb.control & BLOCK != 0;
        let state = self.slot(number)?.state;
        if state > DEFAULT || block && state == DEFAULT {
            return Err(Code::ContextState);
        }
        let memory = self.shared.memory.clone();
        let input = Input::read(&memory, trb.parameter)?;
        if input.drop != 0 || input.add & 3 != 3 {
            return Err(Code::Parameter);
        }
        let (mut device, mut control) = (input.context(0)?, input.context(1)?);
        let port = device.port().and_then(|port| port.checked_sub(1)).ok_or(Code::Parameter)?;
        let port = usize::from(port);
        let taken = self.slots.iter().any(|(it, slot)| *it != number && slot.port == Some(port));
        if port >= self.devices.len() || taken || !control.fits(1) {
            return Err(Code::Parameter);
        }
        if self.devices[port].is_none() || !self.shared.registers().ports[port].is_enabled() {
            return Err(Code::Transaction);
        }
        let dcbaap = self.shared.registers().dcbaap;
        let mut pointer = [0; 8];
        memory.read(dcbaap.wrapping_add(8 * u64::from(number)), &mut pointer)?;
        let at = u64::from_le_bytes(pointer) & !0x3f;
        // The device must not keep a request to the address before.
        self.withdraw(number, 1);
        let (state, address) = if block { (DEFAULT, 0) } else { (ADDRESSED, number) };
        let ring = Endpoint::new(&control);
        device.set_state(state, address);
        control.set_endpoint(ring.state as u32, control.pointer());
        device.write(&memory, at)?;
        control.write(&memory, context::offset(at, 1)?)?;
        let endpoints = [(1, ring)].into();
        self.slots.insert(number, Slot { context: at, port: Some(port), state, endpoints });
        Ok(())
    }

    fn deconfigure(&mut self, number: u8) -> Outcome {
        let state = self.slot(number)?.state;
        if state < ADDRESSED {
            return Err(Code::ContextState);
        }
        self.drop_endpoints(number, u32::MAX);
        self.end_configuration(number, ADDRESSED)
    }

    fn configure(&mut self, number: u8, at: u64) -> Outcome {
        if self.slot(number)?.state < ADDRESSED {
            return Err(Code::ContextState);
        }
        let memory = self.shared.memory.clone();
        let input = Input::read(&memory, at)?;
        if input.drop & 3 != 0 || input.add & 3 != 1 {
            return Err(Code::Parameter);
        }
        // Everything is checked before anything is changed.
        let added = (2..CONTEXTS).filter(|number| input.add >> number & 1 != 0);
        let read = |number| Ok((number, input.context(number)?));
        let added: Vec<(u8, Context)> = added.map(read).collect::<Result<_, NoMemory>>()?;
        let slot = self.slot(number)?;
        let base = slot.context;
        let stays = |it: &u8| slot.endpoints.contains_key(it) && input.drop >> it & 1 == 0;
        if added.iter().any(|(it, context)| !context.fits(*it) || stays(it)) {
            return Err(Code::Parameter);
        }
        self.drop_endpoints(number, input.drop);
        for (it, mut context) in added {
            let endpoint = Endpoint::new(&context);
            context.set_endpoint(endpoint.state as u32, context.pointer());
            context.write(&memory, context::offset(base, it)?)?;
            self.slot(number)?.endpoints.insert(it, endpoint);
        }
        self.end_configuration(number, CONFIGURED)
    }

    /// Disables the endpoints whose bits are set, except for the control endpoint.
    fn drop_endpoints(&mut self, number: u8, which: u32) {
        let memory = self.shared.memory.clone();
        for it in (2..CONTEXTS).filter(|it| which >> it & 1 != 0) {
            self.withdraw(number, it);
            let Some(slot) = self.slots.get_mut(&number) else { return };
            if slot.endpoints.remove(&it).is_some() {
                slot.write_context(&memory, it);
            }
        }
    }

    fn end_configuration(&mut self, number: u8, state: u32) -> Outcome {
        let memory = self.shared.memory.clone();
        let slot = self.slot(number)?;
        slot.state = if slot.endpoints.len() > 1 { CONFIGURED } else { state };
        slot.write_slot_context(&memory, number);
        Ok(())
    }

    /// Copies the fields that may change: the maximum exit latency and the interrupter of a slot,
    /// and the packet size of its control endpoint. They are only written to the output context,
    /// because nothing here uses them.
    fn evaluate(&mut self, number: u8, at: u64) -> Outcome {
        let memory = self.shared.memory.clone();
        let slot = self.slot(number)?;
        if slot.state < DEFAULT {
            return Err(Code::ContextState);
        }
        let input = Input::read(&memory, at)?;
        if input.drop != 0 || input.add & !3 != 0 {
            return Err(Code::Parameter);
        }
        for (it, word, mask) in [(0, 1, 0xffff), (0, 2, 0x3ff << 22), (1, 1, 0xffff << 16)] {
            if input.add >> it & 1 != 0 {
                let at = context::offset(slot.context, it)?;
                let (new, mut old) = (input.context(it)?, Context::read(&memory, at)?);
                old.0[word] = old.0[word] & !mask | new.0[word] & mask;
                old.write(&memory, at)?;
            }
        }
        Ok(())
    }

    /// Moves an endpoint from one of these states to `Stopped`.
    fn stop(&mut self, slot: u8, number: u8, from: &[State]) -> Result<&mut Endpoint, Code> {
        let endpoint = self.slot(slot)?.endpoints.get_mut(&number);
        let endpoint = endpoint.ok_or(Code::EndpointNotEnabled)?;
        if !from.contains(&endpoint.state) {
            return Err(Code::ContextState);
        }
        endpoint.state = State::Stopped;
        Ok(endpoint)
    }

    fn write_context(&mut self, slot: u8, number: u8) {
        if let Some(slot) = self.slots.get(&slot) {
            slot.write_context(&self.shared.memory, number);
        }
    }

    fn reset_endpoint(&mut self, slot: u8, number: u8) -> Outcome {
        let endpoint = self.stop(slot, number, &[State::Halted])?;
        endpoint.setup = None;
        self.write_context(slot, number);
        Ok(())
    }

    fn stop_endpoint(&mut self, slot: u8, number: u8) -> Outcome {
        // A transfer that completes because of the stop completes before the command, and may halt
        // the endpoint.
        let flight = self.withdraw(slot, number);
        let endpoint = self.stop(slot, number, &[State::Running])?;
        endpoint.rung = false;
        if let Some((at, trb)) = flight.and_then(|td| td.trbs.first().copied()) {
            let mut event = Trb::event(TRANSFER_EVENT, Code::Stopped, at);
            event.status |= trb.length();
            event.control |= u32::from(slot) << 24 | u32::from(number) << 16;
            self.push_event(trb.interrupter(), event);
        }
        self.write_context(slot, number);
        Ok(())
    }

    fn set_dequeue(&mut self, slot: u8, number: u8, trb: Trb) -> Outcome {
        // There are no streams.
        if trb.status >> 16 != 0 {
            return Err(Code::Parameter);
        }
        let endpoint = self.stop(slot, number, &[State::Stopped, State::Error])?;
        endpoint.ring = Ring::new(trb.parameter);
        endpoint.setup = None;
        self.write_context(slot, number);
        Ok(())
    }

    fn reset_device(&mut self, number: u8) -> Outcome {
        if self.slot(number)?.state < ADDRESSED {
            return Err(Code::ContextState);
        }
        self.withdraw_all(number, 1);
        self.drop_endpoints(number, u32::MAX);
        let memory = self.shared.memory.clone();
        let slot = self.slot(number)?;
        slot.state = DEFAULT;
        slot.write_slot_context(&memory, number);
        Ok(())
    }

    /// Withdraws the transfers of all endpoints from this number on.
    fn withdraw_all(&mut self, slot: u8, from: u8) {
        for number in from..CONTEXTS {
            self.withdraw(slot, number);
        }
    }

    /// Withdraws the transfers of an endpoint from the device, unless they complete at this moment.
    /// They are taken from the ring again when the endpoint continues. Returns the first one.
    pub(super) fn withdraw(&mut self, slot: u8, number: u8) -> Option<Td> {
        let it = self.slots.get(&slot)?;
        let port = it.port?;
        it.endpoints.get(&number)?.flights.front()?;
        let mut done = Vec::new();
        if let Some(Some(device)) = self.devices.get_mut(port) {
            device.cancel(endpoint::address(number), &mut done);
        }
        self.finish(port, &done);
        let endpoint = self.slots.get_mut(&slot)?.endpoints.get_mut(&number)?;
        std::mem::take(&mut endpoint.flights).pop_front()
    }
}
