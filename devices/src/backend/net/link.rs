//! The state of a cable: whether it is plugged in at both ends, and the longest packet that fits.
//! The controller's guest, the peer and the operator share it.

use std::sync::{Arc, Mutex};

/// The cables of a machine, in the order of their controllers.
#[derive(Default)]
pub struct Links(Mutex<Vec<Arc<Link>>>);

impl Links {
    /// One more.
    pub fn add(&self, link: Arc<Link>) {
        self.0.lock().expect("no network panicked").push(link);
    }

    /// The cable of the controller with this number, from 0 on.
    pub fn get(&self, number: usize) -> Option<Arc<Link>> {
        self.0.lock().expect("no network panicked").get(number).cloned()
    }
}

/// Called when the guest is to look again, on the thread that changed something.
pub type Watch = Box<dyn Fn() + Send>;

/// One cable.
pub struct Link {
    state: Mutex<State>,
    watch: Mutex<Option<Watch>>,
}

/// What can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    /// The operator plugged it in.
    plugged: bool,
    /// There is a peer.
    connected: bool,
    mtu: Option<u16>,
}

impl Link {
    /// A cable with a peer, plugged in.
    pub fn new(mtu: Option<u16>) -> Self {
        let state = State { plugged: true, connected: true, mtu };
        Self { state: Mutex::new(state), watch: Mutex::default() }
    }

    /// Whether frames go through.
    pub fn is_up(&self) -> bool {
        let state = self.state.lock().expect("no network panicked");
        state.plugged && state.connected
    }

    /// Whether the operator plugged it in.
    pub fn is_plugged(&self) -> bool {
        self.state.lock().expect("no network panicked").plugged
    }

    /// The longest packet, where that is known.
    pub fn mtu(&self) -> Option<u16> {
        self.state.lock().expect("no network panicked").mtu
    }

    /// The operator plugs the cable in, or pulls it.
    pub fn plug(&self, plugged: bool) {
        self.change(|state| state.plugged = plugged);
    }

    /// The peer comes, or goes.
    pub fn connect(&self, connected: bool) {
        self.change(|state| state.connected = connected);
    }

    /// The MTU is another one from now on. Guests that never learnt of one do not look.
    pub fn resize(&self, mtu: u16) {
        self.change(|state| state.mtu = Some(mtu));
    }

    /// Calls `watch` after each change from now on, in place of what was called before.
    pub fn watch(&self, watch: Option<Watch>) {
        *self.watch.lock().expect("no network panicked") = watch;
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        // One change is told before the next: the guest is never left with the older one.
        let watch = self.watch.lock().expect("no network panicked");
        let mut state = self.state.lock().expect("no network panicked");
        let before = *state;
        change(&mut state);
        let changed = *state != before;
        drop(state);
        if let Some(watch) = watch.as_ref().filter(|_| changed) {
            watch();
        }
    }
}

#[cfg(test)]
mod test {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn is_up_while_both_ends_are_in_and_tells_only_of_changes() {
        let (link, told) = (Link::new(None), Arc::new(AtomicU32::new(0)));
        let count = told.clone();
        link.watch(Some(Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        })));
        assert!(link.is_up());
        link.plug(true);
        assert_eq!(told.load(Ordering::Relaxed), 0);
        link.plug(false);
        link.connect(false);
        link.plug(true);
        assert!(!link.is_up());
        link.connect(true);
        assert!(link.is_up());
        link.resize(9000);
        link.resize(9000);
        assert_eq!((link.mtu(), told.load(Ordering::Relaxed)), (Some(9000), 5));
    }
}
