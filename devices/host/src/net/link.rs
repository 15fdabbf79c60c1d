//! The state of a cable: whether it is plugged in at both ends, and the longest packet that fits.
//! The controller's guest, the peer and the operator share it.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{bail, ensure};

/// The cables of a machine, by their controllers' names on the board.
#[derive(Default)]
pub struct Links(Mutex<Vec<(String, Arc<Link>)>>);

impl Links {
    /// One more.
    pub fn add(&self, name: &str, link: Arc<Link>) {
        self.0.lock().expect("no network panicked").push((name.to_owned(), link));
    }

    /// All of them, in the order of their controllers.
    pub fn all(&self) -> Vec<(String, Arc<Link>)> {
        self.0.lock().expect("no network panicked").clone()
    }

    /// The cable of the controller with this name.
    ///
    /// # Errors
    ///
    /// When there is none, with those that there are.
    pub fn find(&self, name: &str) -> anyhow::Result<Arc<Link>> {
        let all = self.all();
        if let Some((_, link)) = all.iter().find(|(other, _)| other == name) {
            return Ok(link.clone());
        }
        let names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
        match names.as_slice() {
            [] => bail!("this machine has no network: add --device virtio-net when it is started"),
            names => bail!("there is no network `{name}`, but {}", names.join(", ")),
        }
    }
}

/// The least MTU that there is (VIRTIO 1.3, 5.1.4.1).
pub const LEAST_MTU: u16 = 68;

/// Called when the guest is to look again, on the thread that changed something.
pub type Watch = Box<dyn Fn() + Send>;

/// One cable.
pub struct Link {
    state: Mutex<State>,
    watch: Mutex<Option<Watch>>,
    /// Pairs of queues that the kernel serves.
    in_kernel: AtomicU16,
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
        Self { state: Mutex::new(state), watch: Mutex::default(), in_kernel: AtomicU16::new(0) }
    }

    /// How many pairs of queues the kernel serves now (vhost-net), and not this process.
    pub fn in_kernel(&self) -> u16 {
        self.in_kernel.load(Ordering::Relaxed)
    }

    /// One more pair of queues is the kernel's, or one less.
    pub fn count_in_kernel(&self, more: bool) {
        let one = if more { 1 } else { u16::MAX };
        self.in_kernel.fetch_add(one, Ordering::Relaxed);
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

    /// The MTU is another one from now on.
    ///
    /// # Errors
    ///
    /// When there is no such MTU, or the guest never learnt of one, so that it does not look.
    pub fn resize(&self, mtu: u16) -> anyhow::Result<()> {
        ensure!(mtu >= LEAST_MTU, "an MTU of {mtu}: the least is {LEAST_MTU}");
        ensure!(self.mtu().is_some(), "its guest knows of no MTU: say mtu=N when it is started");
        self.change(|state| state.mtu = Some(mtu));
        Ok(())
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
        let (link, told) = (Link::new(Some(1500)), Arc::new(AtomicU32::new(0)));
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
        link.resize(9000).unwrap();
        link.resize(9000).unwrap();
        assert!(link.resize(67).is_err(), "there is no such MTU");
        assert_eq!((link.mtu(), told.load(Ordering::Relaxed)), (Some(9000), 5));
    }

    #[test]
    fn a_cable_is_found_by_the_name_of_its_controller() {
        let links = Links::default();
        let said = |name| links.find(name).err().unwrap().to_string();
        assert!(said("virtio-net").contains("--device virtio-net"));
        links.add("virtio-net", Arc::new(Link::new(None)));
        links.add("virtio-net.2", Arc::new(Link::new(Some(1500))));
        assert_eq!(links.find("virtio-net.2").unwrap().mtu(), Some(1500));
        assert_eq!(said("eth0"), "there is no network `eth0`, but virtio-net, virtio-net.2");
        let unknown = links.find("virtio-net").unwrap().resize(1400).unwrap_err();
        assert!(unknown.to_string().contains("mtu=N"), "{unknown}");
    }
}
