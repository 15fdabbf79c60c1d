//! The control queue, which ends what the others do, and the events (VIRTIO 1.3, 5.6.6.2 and
//! 5.6.6.3).

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

/// Types of control requests: to manage tasks, to ask for asynchronous events, to subscribe them.
const TASKS: u32 = 0;
const QUERY: u32 = 1;
const SUBSCRIBE: u32 = 2;

/// What can be done to tasks.
const ABORT_TASK: u32 = 0;
const ABORT_TASK_SET: u32 = 1;
const CLEAR_TASK_SET: u32 = 3;
const I_T_NEXUS_RESET: u32 = 4;
const LOGICAL_UNIT_RESET: u32 = 5;
const QUERY_TASK: u32 = 6;
const QUERY_TASK_SET: u32 = 7;

/// The event of a unit that changed, and how: CAPACITY DATA HAS CHANGED.
const PARAM_CHANGE: u32 = 3;
const CAPACITY_CHANGED: u32 = 0x092a;

pub(super) struct Control {
    /// By their numbers, if the driver has them.
    queues: [Option<Queue>; 2],
    servers: Vec<Arc<Mutex<Server>>>,
    target: Arc<Target>,
    /// The driver wants to hear of changes.
    told: bool,
    /// Where events go.
    room: VecDeque<Chain>,
}

impl Control {
    pub(super) fn new(
        queues: [Option<Queue>; 2],
        servers: Vec<Arc<Mutex<Server>>>,
        (target, told): (Arc<Target>, bool),
    ) -> Self {
        Self { queues, servers, target, told, room: VecDeque::new() }
    }

    /// Its queues, as the driver left them.
    pub(super) fn finish(self) -> Vec<Queue> {
        let [control, mut events] = self.queues;
        if let Some(queue) = &mut events {
            self.room.into_iter().rev().for_each(|chain| queue.undo(chain));
        }
        control.into_iter().chain(events).collect()
    }

    fn queue(&mut self, number: u16) -> Option<&mut Queue> {
        self.queues[usize::from(number)].as_mut()
    }

    /// Does what the driver asks for. False when there is nothing.
    fn obey(&mut self) -> bool {
        let Some(mut chain) = self.queue(CONTROL).and_then(Queue::pop) else { return false };
        let answer = self.request(&mut chain);
        let Some(queue) = self.queue(CONTROL) else { return false };
        let written = answer.filter(|it| queue.memory().scatter(&chain.writable, it).is_ok());
        if let Some(answer) = written {
            queue.push(chain, u32::try_from(answer.len()).unwrap_or(0));
            queue.notify();
        } else {
            queue.undo(chain);
            queue.fail("a control request that is none, or without room for its response");
        }
        true
    }

    /// What is answered.
    fn request(&mut self, chain: &mut Chain) -> Option<Vec<u8>> {
        let memory = self.queues[usize::from(CONTROL)].as_ref()?.memory();
        let word = |bytes: [u8; 4]| u32::from_le_bytes(bytes);
        match word(chain.take(memory).ok()?) {
            TASKS => {
                let function = word(chain.take(memory).ok()?);
                let (lun, id) = (chain.take(memory).ok()?, chain.take(memory).ok()?);
                Some(vec![self.manage(function, lun, u64::from_le_bytes(id))])
            }
            // There are no asynchronous events of media: the drivers poll.
            QUERY | SUBSCRIBE => {
                let lun = chain.take(memory).ok()?;
                word(chain.take(memory).ok()?);
                let response = match Addressee::of(lun) {
                    Addressee::Unit => OK,
                    Addressee::Beside => INCORRECT_LUN,
                    Addressee::Nobody => BAD_TARGET,
                };
                Some(vec![0, 0, 0, 0, response])
            }
            _ => None,
        }
    }

    /// Task management (SAM-5, 7): the response.
    fn manage(&self, function: u32, lun: [u8; 8], id: u64) -> u8 {
        match Addressee::of(lun) {
            Addressee::Nobody => return BAD_TARGET,
            Addressee::Beside if function != I_T_NEXUS_RESET => return INCORRECT_LUN,
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

    /// Tells the driver what happened, as soon as it has room for that.
    fn tell(&mut self) -> bool {
        let Self { queues, room, target, .. } = self;
        let Some(queue) = &mut queues[usize::from(EVENTS)] else { return false };
        let before = room.len();
        room.extend(std::iter::from_fn(|| queue.pop()));
        let any = room.len() > before;
        if !self.told {
            target.told();
        }
        if !target.is_grown() {
            return any;
        }
        let Some(chain) = room.pop_front() else { return any };
        target.told();
        let [event, reason] = [PARAM_CHANGE, CAPACITY_CHANGED].map(u32::to_le_bytes);
        let bytes = [&event[..], &[1, 0, 0, 0, 0, 0, 0, 0], &reason].concat();
        // What the driver has no memory for is its loss.
        let written = queue.memory().scatter(&chain.writable, &bytes).map_or(0, |()| bytes.len());
        queue.push(chain, u32::try_from(written).unwrap_or(0));
        queue.notify();
        true
    }
}

impl Serve for Control {
    fn serve(&mut self) -> bool {
        let obeyed = self.obey();
        self.tell() || obeyed
    }

    fn listen(&mut self) -> bool {
        // The first one that has something keeps this thread awake; the other is asked then.
        self.queues.iter_mut().flatten().any(Queue::listen)
    }

    fn quiet(&mut self) {
        self.queues.iter_mut().flatten().for_each(Queue::quiet);
    }

    fn events(&self) -> Vec<RawFd> {
        let bells = self.queues.iter().flatten().map(|queue| queue.bell().as_raw_fd());
        bells.chain([self.target.kick().as_raw_fd()]).collect()
    }

    fn heard(&mut self) {
        self.queues.iter().flatten().for_each(|queue| drop(queue.bell().read()));
        self.target.kick().read().ok();
    }
}
