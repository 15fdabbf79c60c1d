//! The I/O queues of a controller: their servers, and the doorbells that the guest shadows in its
//! memory (Doorbell Buffer Config, NVMe 1.4, 5.7).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::group::{self, Group};
use super::queues::Shadow;
use super::server::Server;
use super::{DOORBELLS, Shared};
use crate::bus::Window;
use host::memory::NoMemory;

const DOORBELL_LENGTH: u32 = 4;

pub(super) struct IoQueues {
    /// Indexed by completion queue.
    pub(super) servers: BTreeMap<u16, Server>,
    pub(super) shadow: Option<Shadow>,
    shared: Arc<Shared>,
    window: Arc<Window>,
}

impl IoQueues {
    pub(super) fn new(shared: &Arc<Shared>, window: &Arc<Window>, shadow: Option<Shadow>) -> Self {
        let (shared, window) = (shared.clone(), window.clone());
        Self { servers: BTreeMap::new(), shadow, shared, window }
    }

    pub(super) fn restore(&mut self, groups: Vec<group::SavedState>) -> anyhow::Result<()> {
        for group in groups {
            let group = Group::restore(self.shared.clone(), group)?;
            let id = group.completion.id;
            self.servers.insert(id, Server::start(group)?);
        }
        for (id, server) in &self.servers {
            for queue in server.lock().submissions.iter().filter(|_| self.shadow.is_some()) {
                self.connect(queue.id, server);
            }
            tracing::trace!("NVMe queue {id} resumes");
        }
        Ok(())
    }

    pub(super) fn save(&mut self) -> Vec<group::SavedState> {
        let servers = std::mem::take(&mut self.servers).into_values();
        servers.map(|server| server.stop().save()).collect()
    }

    /// The server of a submission queue.
    pub(super) fn server_of(&self, queue: u16) -> Option<&Server> {
        let has = |server: &&Server| server.lock().submissions.iter().any(|it| it.id == queue);
        self.servers.values().find(has)
    }

    /// Shadow addresses of a queue's doorbell. `which` is 0 for the tail and 1 for the head.
    pub(super) fn shadow_of(&self, queue: u16, which: u64) -> Option<Shadow> {
        let offset = 8 * u64::from(queue) + 4 * which;
        self.shadow.map(|Shadow { doorbell, event }| Shadow {
            doorbell: doorbell + offset,
            event: event + offset,
        })
    }

    /// Enables shadow doorbells for the queues that exist.
    pub(super) fn enable_shadows(&self) -> Result<(), NoMemory> {
        let (bells, memory) = (&self.shared.bells, &self.shared.memory);
        for (id, server) in &self.servers {
            let mut group = server.lock();
            if let Some(shadow) = self.shadow_of(*id, 1) {
                group.completion.update_head(bells, memory);
                group.completion.set_shadow(memory, shadow)?;
            }
            for queue in &mut group.submissions {
                if let Some(shadow) = self.shadow_of(queue.id, 0) {
                    queue.read_tail(bells, memory)?;
                    queue.set_shadow(memory, shadow)?;
                    self.connect(queue.id, server);
                }
            }
            drop(group);
            server.waker().wake_always();
        }
        Ok(())
    }

    /// Lets a shadowed doorbell ring without an exit. The value of the ring does not matter.
    pub(super) fn connect(&self, queue: u16, server: &Server) {
        let event = server.waker().event.clone();
        self.window.connect_doorbell(doorbell(queue), DOORBELL_LENGTH, event);
    }

    pub(super) fn disconnect(&self, queue: u16) {
        self.window.disconnect_doorbell(doorbell(queue));
    }

    pub(super) fn disconnect_all(&self) {
        for queue in 1..=self.shared.queues {
            self.disconnect(queue);
        }
    }
}

/// Offset of a submission queue's doorbell.
fn doorbell(queue: u16) -> u64 {
    DOORBELLS + 8 * u64::from(queue)
}
