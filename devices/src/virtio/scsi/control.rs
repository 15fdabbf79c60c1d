//! The control queue, which manages tasks of the request queues, and the event queue (VIRTIO 1.3,
//! 5.6.6.2 and 5.6.6.3).

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard};

use super::request::Server;
use super::target::{
    ABORTED, Addressee, BAD_TARGET, INCORRECT_LUN, OK, REJECTED, RESET, SUCCEEDED, Target,
};
use super::{CONTROL, EVENTS};
use crate::poller::Serve;
use crate::virtio::{Chain, Queue};

/// Types of control requests: task management, query and subscription of asynchronous events.
const TASKS: u32 = 0;
const QUERY: u32 = 1;
const SUBSCRIBE: u32 = 2;

/// Task management functions.
const ABORT_TASK: u32 = 0;
const ABORT_TASK_SET: u32 = 1;
const CLEAR_TASK_SET: u32 = 3;
const I_T_NEXUS_RESET: u32 = 4;
const LOGICAL_UNIT_RESET: u32 = 5;
const QUERY_TASK: u32 = 6;
const QUERY_TASK_SET: u32 = 7;

/// The event type for a changed unit, and its reason: CAPACITY DATA HAS CHANGED.
const PARAM_CHANGE: u32 = 3;
const CAPACITY_CHANGED: u32 = 0x092a;

pub(super) struct Control {
    /// Indexed by queue number. None if the driver did not enable the queue.
    queues: [Option<Queue>; 2],
    servers: Vec<Arc<Mutex<Server>>>,
    target: Arc<Target>,
    /// CHANGE was negotiated: the driver wants events for parameter changes.
    wants_events: bool,
    /// Buffers for events.
    room: VecDeque<Chain>,
}

impl Control {
    pub(super) fn new(
        queues: [Option<Queue>; 2],
        servers: Vec<Arc<Mutex<Server>>>,
        target: Arc<Target>,
        wants_events: bool,
    ) -> Self {
        Self { queues, servers, target, wants_events, room: VecDeque::new() }
    }

    /// Returns the queues with the buffers that are not used.
    pub(super) fn finish(self) -> Vec<Queue> {
        let [control, mut events] = self.queues;
        if let Some(queue) = &mut events {
            self.room.into_iter().rev().for_each(|chain| queue.return_chain(chain));
        }
        control.into_iter().chain(events).collect()
    }

    fn queue(&mut self, number: u16) -> Option<&mut Queue> {
        self.queues[usize::from(number)].as_mut()
    }

    /// Returns false if there was no request.
    fn serve_control(&mut self) -> bool {
        let Some(mut chain) = self.queue(CONTROL).and_then(Queue::pop) else { return false };
        let answer = self.request(&mut chain);
        let Some(queue) = self.queue(CONTROL) else { return false };
        let written = answer.filter(|it| queue.memory.scatter(&chain.writable, it).is_ok());
        if let Some(answer) = written {
            queue.push(chain, u32::try_from(answer.len()).unwrap_or(0));
            queue.notify();
        } else {
            queue.return_chain(chain);
            queue.fail("an invalid control request, or one without room for its response");
        }
        true
    }

    /// None if the request is invalid.
    fn request(&mut self, chain: &mut Chain) -> Option<Vec<u8>> {
        let memory = &self.queues[usize::from(CONTROL)].as_ref()?.memory;
        let word = |bytes: [u8; 4]| u32::from_le_bytes(bytes);
        match word(chain.take(memory).ok()?) {
            TASKS => {
                let function = word(chain.take(memory).ok()?);
                let (lun, id) = (chain.take(memory).ok()?, chain.take(memory).ok()?);
                Some(vec![self.manage(function, lun, u64::from_le_bytes(id))])
            }
            // There are no asynchronous media events: the drivers poll.
            QUERY | SUBSCRIBE => {
                let lun = chain.take(memory).ok()?;
                word(chain.take(memory).ok()?);
                let response = match Addressee::of(lun) {
                    Addressee::Unit => OK,
                    Addressee::OtherUnit => INCORRECT_LUN,
                    Addressee::NoTarget => BAD_TARGET,
                };
                Some(vec![0, 0, 0, 0, response])
            }
            _ => None,
        }
    }

    /// Task management (SAM-5, 7). Returns the response code.
    fn manage(&self, function: u32, lun: [u8; 8], id: u64) -> u8 {
        match Addressee::of(lun) {
            Addressee::NoTarget => return BAD_TARGET,
            Addressee::OtherUnit if function != I_T_NEXUS_RESET => return INCORRECT_LUN,
            _ => {}
        }
        match function {
            ABORT_TASK => self.abort(Some(id), ABORTED),
            ABORT_TASK_SET | CLEAR_TASK_SET => self.abort(None, ABORTED),
            I_T_NEXUS_RESET | LOGICAL_UNIT_RESET => {
                self.abort(None, RESET);
                self.target.conditions().reset();
            }
            QUERY_TASK if self.has(Some(id)) => return SUCCEEDED,
            QUERY_TASK_SET if self.has(None) => return SUCCEEDED,
            QUERY_TASK | QUERY_TASK_SET => {}
            _ => return REJECTED,
        }
        OK
    }

    fn servers(&self) -> impl Iterator<Item = MutexGuard<'_, Server>> {
        self.servers.iter().map(|it| it.lock().expect("no device panicked"))
    }

    fn abort(&self, id: Option<u64>, response: u8) {
        self.servers().for_each(|mut server| server.abort(id, response));
    }

    fn has(&self, id: Option<u64>) -> bool {
        self.servers().any(|mut server| server.has(id))
    }

    /// Sends an event if the disk has grown and the driver offers a buffer.
    fn send_events(&mut self) -> bool {
        let Self { queues, room, target, .. } = self;
        let Some(queue) = &mut queues[usize::from(EVENTS)] else { return false };
        let before = room.len();
        room.extend(std::iter::from_fn(|| queue.pop()));
        let any = room.len() > before;
        if !self.wants_events {
            target.clear_grown();
        }
        if !target.is_grown() {
            return any;
        }
        let Some(chain) = room.pop_front() else { return any };
        target.clear_grown();
        let [event, reason] = [PARAM_CHANGE, CAPACITY_CHANGED].map(u32::to_le_bytes);
        let bytes = [&event[..], &[1, 0, 0, 0, 0, 0, 0, 0], &reason].concat();
        // If the buffer is outside of memory, the event is lost.
        let written = queue.memory.scatter(&chain.writable, &bytes).map_or(0, |()| bytes.len());
        queue.push(chain, u32::try_from(written).unwrap_or(0));
        queue.notify();
        true
    }
}

impl Serve for Control {
    fn serve(&mut self) -> bool {
        let served = self.serve_control();
        self.send_events() || served
    }

    fn enable_doorbells(&mut self) -> bool {
        // It stops at the first queue with work. The other one is checked on the next call.
        self.queues.iter_mut().flatten().any(Queue::enable_doorbell)
    }

    fn disable_doorbells(&mut self) {
        self.queues.iter_mut().flatten().for_each(Queue::disable_doorbell);
    }

    fn events(&self) -> Vec<RawFd> {
        let bells = self.queues.iter().flatten().map(|queue| queue.bell.as_raw_fd());
        bells.chain([self.target.kick.as_raw_fd()]).collect()
    }

    fn clear_events(&mut self) {
        self.queues.iter().flatten().for_each(|queue| drop(queue.bell.read()));
        self.target.kick.read().ok();
    }
}
