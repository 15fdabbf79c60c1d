//! The admin command set (NVMe 1.4, 5): queues, features, logs, events.
//!
//! Threats: every identifier, size and address is checked here, once, when the queue is made; the
//! queues' memory is looked at again with each access.

use super::Shared;
use super::command::{Answer, Command, Status};
use super::controller::Controller;
use super::group::Group;
use super::identify;
use super::log;
use super::prp::{self, LARGEST};
use super::queues::{Completion, ENTRIES, Shadow, Submission};
use super::server::Server;

const DELETE_SUBMISSION: u8 = 0x00;
const CREATE_SUBMISSION: u8 = 0x01;
const LOG_PAGE: u8 = 0x02;
const DELETE_COMPLETION: u8 = 0x04;
const CREATE_COMPLETION: u8 = 0x05;
const IDENTIFY: u8 = 0x06;
const ABORT: u8 = 0x08;
const SET_FEATURES: u8 = 0x09;
const GET_FEATURES: u8 = 0x0a;
const EVENT_REQUEST: u8 = 0x0c;
const DOORBELL_BUFFER: u8 = 0x7c;

/// What there is.
const OPCODES: &[u8] = &[
    DELETE_SUBMISSION,
    CREATE_SUBMISSION,
    LOG_PAGE,
    DELETE_COMPLETION,
    CREATE_COMPLETION,
    IDENTIFY,
    ABORT,
    SET_FEATURES,
    GET_FEATURES,
    EVENT_REQUEST,
    DOORBELL_BUFFER,
];

/// What there is now.
pub(super) fn opcodes(shared: &Shared) -> impl Iterator<Item = u8> {
    let offered = |it: &u8| *it != DOORBELL_BUFFER || shared.offers_shadows();
    OPCODES.iter().copied().filter(offered)
}

/// Of a queue's dword 11: physically contiguous, which is required; interrupts.
const CONTIGUOUS: u16 = 1 << 0;
const INTERRUPTS: u16 = 1 << 1;
/// CC: the sizes of I/O queue entries, 2^6 and 2^4 bytes.
const ENTRY_SIZES: u32 = 0xff << 16;
const SIZES: u32 = 0x46 << 16;
/// Get Log Page: the guest asks not to be told of more events yet.
const RETAIN: u32 = 1 << 15;
/// An abort that aborted nothing.
const NOT_ABORTED: u32 = 1;

/// Does a command; nothing when it is answered later.
pub(super) fn execute(controller: &mut Controller, command: &Command) -> Option<Answer> {
    if command.is_fused_or_sgl() {
        return Some(Err(Status::INVALID_FIELD));
    }
    Some(match command.opcode() {
        DELETE_SUBMISSION => delete_submission(controller, command),
        CREATE_SUBMISSION => create_submission(controller, command),
        LOG_PAGE => log_page(controller, command),
        DELETE_COMPLETION => delete_completion(controller, command),
        CREATE_COMPLETION => create_completion(controller, command),
        IDENTIFY => identify(controller, command),
        ABORT => Ok(abort(controller, command)),
        SET_FEATURES => return controller.set_feature(command),
        GET_FEATURES => controller.features.get(&controller.shared, command),
        EVENT_REQUEST => match controller.events.request(command.id()) {
            Ok(()) => return None,
            Err(status) => Err(status),
        },
        DOORBELL_BUFFER if controller.shared.offers_shadows() => {
            shadow_doorbells(controller, command)
        }
        _ => Err(Status::INVALID_OPCODE),
    })
}

/// The number, size and memory of a queue that is to be.
fn new_queue(
    controller: &Controller,
    command: &Command,
    exists: bool,
) -> Result<(u16, u32, u64), Status> {
    let (id, size) = command.halves(10);
    let size = u32::from(size) + 1;
    if id == 0 || id > controller.shared.queues || exists {
        return Err(Status::INVALID_QUEUE);
    }
    let sizes = controller.shared.registers().cc & ENTRY_SIZES;
    if !(2..=ENTRIES).contains(&size) || sizes != SIZES {
        return Err(Status::INVALID_QUEUE_SIZE);
    }
    if command.halves(11).0 & CONTIGUOUS == 0 {
        return Err(Status::INVALID_FIELD);
    }
    let (at, _) = command.prp();
    if at & u64::from(controller.shared.page() - 1) != 0 {
        return Err(Status::PRP_OFFSET);
    }
    Ok((id, size, at))
}

fn create_completion(controller: &mut Controller, command: &Command) -> Answer {
    let exists = controller.servers.contains_key(&command.halves(10).0);
    let (id, size, at) = new_queue(controller, command, exists)?;
    let (flags, vector) = command.halves(11);
    let shared = &controller.shared;
    // A wire has no vectors.
    let vectors = if shared.bells.uses_messages() { shared.vectors() } else { 1 };
    if vector >= vectors {
        return Err(Status::INVALID_VECTOR);
    }
    let vector = (flags & INTERRUPTS != 0).then_some(vector);
    let mut queue = Completion::new(id, size, at, vector);
    if let Some(shadow) = controller.shadow_of(id, 1) {
        queue.follow(&shared.memory, shadow).map_err(|_| Status::DATA_TRANSFER)?;
    }
    let server = Group::new(shared.clone(), queue).and_then(Server::start).map_err(|error| {
        shared.told.call_once(|| tracing::warn!("NVMe queue {id} cannot be served: {error:#}"));
        Status::INTERNAL
    })?;
    controller.servers.insert(id, server);
    Ok(0)
}

fn create_submission(controller: &mut Controller, command: &Command) -> Answer {
    let exists = controller.server_of(command.halves(10).0).is_some();
    let (id, size, at) = new_queue(controller, command, exists)?;
    let (_, to) = command.halves(11);
    if to == 0 || to > controller.shared.queues {
        return Err(Status::INVALID_QUEUE);
    }
    let shared = &controller.shared;
    let server = controller.servers.get(&to).ok_or(Status::COMPLETION_QUEUE_INVALID)?;
    let mut queue = Submission::new(id, size, at);
    if let Some(shadow) = controller.shadow_of(id, 0) {
        queue.follow(&shared.memory, shadow).map_err(|_| Status::DATA_TRANSFER)?;
        controller.connect(id, server);
    }
    shared.bells.tail(id).open(size, 0, server.waker());
    server.lock().submissions.push(queue);
    server.waker().rouse();
    Ok(0)
}

fn delete_submission(controller: &mut Controller, command: &Command) -> Answer {
    let (id, _) = command.halves(10);
    let server = controller.server_of(id).ok_or(Status::INVALID_QUEUE)?;
    controller.disconnect(id);
    controller.shared.bells.tail(id).close();
    let mut group = server.lock();
    group.abandon(id);
    group.submissions.retain(|queue| queue.id != id);
    drop(group);
    // What its other queues have to do, and what was posted without a word.
    server.waker().rouse();
    Ok(0)
}

fn delete_completion(controller: &mut Controller, command: &Command) -> Answer {
    let (id, _) = command.halves(10);
    let server = controller.servers.get(&id).ok_or(Status::INVALID_QUEUE)?;
    if !server.lock().submissions.is_empty() {
        return Err(Status::INVALID_QUEUE_DELETION);
    }
    controller.servers.remove(&id);
    controller.shared.bells.settle();
    Ok(0)
}

fn identify(controller: &Controller, command: &Command) -> Answer {
    let [structure, ..] = command.dword(10).to_le_bytes();
    let [.., command_set] = command.dword(11).to_le_bytes();
    let shared = &controller.shared;
    let page = identify::page(shared, structure, command.nsid(), command_set)?;
    prp::copy_out(&shared.memory, shared.page(), command.prp(), &page)?;
    Ok(0)
}

fn log_page(controller: &mut Controller, command: &Command) -> Answer {
    let shared = controller.shared.clone();
    let [number, ..] = command.dword(10).to_le_bytes();
    let (lower, upper) = (command.halves(10).1, command.halves(11).0);
    let length = (u64::from(upper) << 16 | u64::from(lower)) * 4 + 4;
    let offset = u64::from(command.dword(13)) << 32 | u64::from(command.dword(12));
    if !matches!(command.nsid(), 0 | super::io::NAMESPACE | super::io::EVERY_NAMESPACE) {
        return Err(Status::INVALID_NAMESPACE);
    }
    let page = log::page(&shared, &controller.features, number).ok_or(Status::INVALID_LOG_PAGE)?;
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    if offset & 3 != 0 || start > page.len() || length > u64::from(LARGEST) {
        return Err(Status::INVALID_FIELD);
    }
    let mut data = page[start..].to_vec();
    // What lies behind the end is zeros.
    data.resize(usize::try_from(length).map_err(|_| Status::INVALID_FIELD)?, 0);
    prp::copy_out(&shared.memory, shared.page(), command.prp(), &data)?;
    if command.dword(10) & RETAIN == 0 {
        if log::tells_changes(number) {
            shared.health().changed = false;
        }
        controller.events.unmask(number);
    }
    Ok(0)
}

/// What the disk has begun is not stopped; a request for events is.
fn abort(controller: &mut Controller, command: &Command) -> u32 {
    let (queue, id) = command.halves(10);
    if queue != 0 || !controller.events.abort(id) {
        return NOT_ABORTED;
    }
    controller.answer(id, Err(Status::ABORTED));
    0
}

/// Doorbell Buffer Config: from now on the guest writes doorbells into its memory, and rings only
/// when it is asked to. A ring is then without value, and need not leave the kernel.
fn shadow_doorbells(controller: &mut Controller, command: &Command) -> Answer {
    let (doorbells, events) = command.prp();
    let within = u64::from(controller.shared.page() - 1);
    if doorbells & within != 0 || events & within != 0 || doorbells == 0 || events == 0 {
        return Err(Status::INVALID_FIELD);
    }
    let memory = &controller.shared.memory;
    let last = 8 * u64::from(controller.shared.queues) + 7;
    for page in [doorbells, events] {
        let end = page.checked_add(last).ok_or(Status::INVALID_FIELD)?;
        memory.read(end, &mut [0]).map_err(|_| Status::DATA_TRANSFER)?;
    }
    controller.shadow = Some(Shadow { doorbell: doorbells, event: events });
    controller.follow().map_err(|_| Status::DATA_TRANSFER)?;
    Ok(0)
}
