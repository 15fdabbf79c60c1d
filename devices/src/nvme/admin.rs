//! The admin command set (NVMe 1.4, 5): queues, features, logs, events.
//!
//! Threats: identifiers, sizes and addresses of queues are checked once, when the queue is created.
//! The queues' memory is checked on every access.

use std::sync::Arc;

use super::Shared;
use super::command::{Answer, Command, Prp, Status};
use super::events::{Event, Events};
use super::features::{self, Features};
use super::group::Group;
use super::identify;
use super::io_queues::IoQueues;
use super::log;
use super::opcodes::{
    ABORT, CREATE_COMPLETION, CREATE_SUBMISSION, DELETE_COMPLETION, DELETE_SUBMISSION,
    DOORBELL_BUFFER, EVENT_REQUEST, GET_FEATURES, IDENTIFY, LOG_PAGE, SET_FEATURES,
};
use super::prp::{self, MAX_TRANSFER};
use super::queues::{CompletionQueue, MAX_ENTRIES, Shadow, SubmissionQueue};
use super::server::Server;

/// Bits of dword 11 for a new queue: physically contiguous (required), interrupts enabled.
const CONTIGUOUS: u16 = 1 << 0;
const INTERRUPTS: u16 = 1 << 1;
/// CC: the sizes of I/O queue entries, and the only valid value: 2^6 and 2^4 bytes.
const ENTRY_SIZES: u32 = 0xff << 16;
const SIZES: u32 = 0x46 << 16;
/// Get Log Page: retain the asynchronous event.
const RETAIN: u32 = 1 << 15;
const NOT_ABORTED: u32 = 1;

pub(super) struct State {
    pub(super) shared: Arc<Shared>,
    pub(super) features: Features,
    pub(super) events: Events,
    pub(super) queues: IoQueues,
}

/// How the controller continues with a command after `execute`.
pub(super) enum Outcome {
    Answered(Answer),
    /// An event answers it later.
    Pending,
    /// Flush the write cache, then answer it.
    Flush,
    /// Answer the event request with this identifier as aborted, then the command as successful.
    Aborted(u16),
}

/// Executes a command as far as it concerns the state.
pub(super) fn execute(state: &mut State, command: &Command) -> Outcome {
    if command.is_fused_or_sgl() {
        return Outcome::Answered(Err(Status::INVALID_FIELD));
    }
    Outcome::Answered(match command.opcode() {
        DELETE_SUBMISSION => delete_submission(state, command),
        CREATE_SUBMISSION => create_submission(state, command),
        LOG_PAGE => log_page(state, command),
        DELETE_COMPLETION => delete_completion(state, command),
        CREATE_COMPLETION => create_completion(state, command),
        IDENTIFY => identify(state, command),
        ABORT => return abort(state, command),
        SET_FEATURES => return set_feature(state, command),
        GET_FEATURES => state.features.get(&state.shared, command),
        EVENT_REQUEST => match state.events.request(command.id()) {
            Ok(()) => return Outcome::Pending,
            Err(status) => Err(status),
        },
        DOORBELL_BUFFER if state.shared.offers_shadows() => shadow_doorbells(state, command),
        _ => Err(Status::INVALID_OPCODE),
    })
}

/// Returns the queue's number, size and address.
fn new_queue(state: &State, command: &Command, exists: bool) -> Result<(u16, u32, u64), Status> {
    let (id, size) = command.halves(10);
    let size = u32::from(size) + 1;
    if id == 0 || id > state.shared.queues || exists {
        return Err(Status::INVALID_QUEUE);
    }
    let sizes = state.shared.registers().cc & ENTRY_SIZES;
    if !(2..=MAX_ENTRIES).contains(&size) || sizes != SIZES {
        return Err(Status::INVALID_QUEUE_SIZE);
    }
    if command.halves(11).0 & CONTIGUOUS == 0 {
        return Err(Status::INVALID_FIELD);
    }
    let at = command.prp().first;
    if at & u64::from(state.shared.page() - 1) != 0 {
        return Err(Status::PRP_OFFSET);
    }
    Ok((id, size, at))
}

fn create_completion(state: &mut State, command: &Command) -> Answer {
    let exists = state.queues.servers.contains_key(&command.halves(10).0);
    let (id, size, at) = new_queue(state, command, exists)?;
    let (flags, vector) = command.halves(11);
    let shared = &state.shared;
    // With an interrupt line there is only vector 0.
    let vectors = if shared.bells.uses_messages() { shared.vectors() } else { 1 };
    if vector >= vectors {
        return Err(Status::INVALID_VECTOR);
    }
    let vector = (flags & INTERRUPTS != 0).then_some(vector);
    let mut queue = CompletionQueue::new(id, size, at, vector);
    if let Some(shadow) = state.queues.shadow_of(id, 1) {
        queue.set_shadow(&shared.memory, shadow).map_err(|_| Status::DATA_TRANSFER)?;
    }
    let server = Group::new(shared.clone(), queue).and_then(Server::start).map_err(|error| {
        shared.logged.call_once(|| tracing::warn!("NVMe queue {id} cannot be served: {error:#}"));
        Status::INTERNAL
    })?;
    state.queues.servers.insert(id, server);
    Ok(0)
}

fn create_submission(state: &mut State, command: &Command) -> Answer {
    let exists = state.queues.server_of(command.halves(10).0).is_some();
    let (id, size, at) = new_queue(state, command, exists)?;
    let (_, to) = command.halves(11);
    if to == 0 || to > state.shared.queues {
        return Err(Status::INVALID_QUEUE);
    }
    let shared = &state.shared;
    let server = state.queues.servers.get(&to).ok_or(Status::COMPLETION_QUEUE_INVALID)?;
    let mut queue = SubmissionQueue::new(id, size, at);
    if let Some(shadow) = state.queues.shadow_of(id, 0) {
        queue.set_shadow(&shared.memory, shadow).map_err(|_| Status::DATA_TRANSFER)?;
        state.queues.connect(id, server);
    }
    shared.bells.tail(id).open(size, 0, server.waker());
    server.lock().submissions.push(queue);
    server.waker().wake_always();
    Ok(0)
}

fn delete_submission(state: &mut State, command: &Command) -> Answer {
    let (id, _) = command.halves(10);
    let server = state.queues.server_of(id).ok_or(Status::INVALID_QUEUE)?;
    state.queues.disconnect(id);
    state.shared.bells.tail(id).close();
    let mut group = server.lock();
    group.abort_queue(id);
    group.submissions.retain(|queue| queue.id != id);
    drop(group);
    // For the other queues of this server, and for completions without a notification yet.
    server.waker().wake_always();
    Ok(0)
}

fn delete_completion(state: &mut State, command: &Command) -> Answer {
    let (id, _) = command.halves(10);
    let server = state.queues.servers.get(&id).ok_or(Status::INVALID_QUEUE)?;
    if !server.lock().submissions.is_empty() {
        return Err(Status::INVALID_QUEUE_DELETION);
    }
    state.queues.servers.remove(&id);
    state.shared.bells.update_line();
    Ok(0)
}

fn identify(state: &State, command: &Command) -> Answer {
    let [structure, ..] = command.dword(10).to_le_bytes();
    let [.., command_set] = command.dword(11).to_le_bytes();
    let shared = &state.shared;
    let page = identify::page(shared, structure, command.nsid(), command_set)?;
    prp::copy_out(&shared.memory, shared.page(), command.prp(), &page)?;
    Ok(0)
}

fn log_page(state: &mut State, command: &Command) -> Answer {
    let shared = state.shared.clone();
    let [number, ..] = command.dword(10).to_le_bytes();
    let (lower, upper) = (command.halves(10).1, command.halves(11).0);
    let length = (u64::from(upper) << 16 | u64::from(lower)) * 4 + 4;
    let offset = u64::from(command.dword(13)) << 32 | u64::from(command.dword(12));
    if !matches!(command.nsid(), 0 | super::io::NAMESPACE | super::io::EVERY_NAMESPACE) {
        return Err(Status::INVALID_NAMESPACE);
    }
    let page = log::page(&shared, &state.features, number).ok_or(Status::INVALID_LOG_PAGE)?;
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    if offset & 3 != 0 || start > page.len() || length > u64::from(MAX_TRANSFER) {
        return Err(Status::INVALID_FIELD);
    }
    let mut data = page[start..].to_vec();
    // Bytes beyond the end of a log page read as zeros.
    data.resize(usize::try_from(length).map_err(|_| Status::INVALID_FIELD)?, 0);
    prp::copy_out(&shared.memory, shared.page(), command.prp(), &data)?;
    if command.dword(10) & RETAIN == 0 {
        if log::clears_changes(number) {
            shared.health().changed = false;
        }
        state.events.unmask(number);
    }
    Ok(0)
}

/// Only event requests can be aborted. Requests that the disk has started are not stopped.
fn abort(state: &mut State, command: &Command) -> Outcome {
    let (queue, id) = command.halves(10);
    if queue != 0 || !state.events.abort(id) {
        return Outcome::Answered(Ok(NOT_ABORTED));
    }
    Outcome::Aborted(id)
}

fn set_feature(state: &mut State, command: &Command) -> Outcome {
    let used = !state.queues.servers.is_empty();
    let answer = state.features.set(&state.shared, command, used);
    if answer.is_ok() && state.features.reports_temperature() {
        state.events.raise(Event::TEMPERATURE);
    }
    if answer.is_ok() && features::disables_cache(command) {
        return Outcome::Flush;
    }
    Outcome::Answered(answer)
}

/// Doorbell Buffer Config: the guest now writes doorbells to its memory, and rings only when asked.
/// The value of a ring no longer matters, so the kernel can handle it.
fn shadow_doorbells(state: &mut State, command: &Command) -> Answer {
    let Prp { first: doorbells, second: events } = command.prp();
    let within = u64::from(state.shared.page() - 1);
    if doorbells & within != 0 || events & within != 0 || doorbells == 0 || events == 0 {
        return Err(Status::INVALID_FIELD);
    }
    let memory = &state.shared.memory;
    let last = 8 * u64::from(state.shared.queues) + 7;
    for page in [doorbells, events] {
        let end = page.checked_add(last).ok_or(Status::INVALID_FIELD)?;
        memory.read(end, &mut [0]).map_err(|_| Status::DATA_TRANSFER)?;
    }
    state.queues.shadow = Some(Shadow { doorbell: doorbells, event: events });
    state.queues.enable_shadows().map_err(|_| Status::DATA_TRANSFER)?;
    Ok(0)
}
