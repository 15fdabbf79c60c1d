//! The state of a network link: whether both ends are connected, and the MTU. The guest, the
//! backend's peer and the operator share it.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{bail, ensure};

use super::arrivals::Arrivals;

/// The links of a machine, by the names of their controllers on the board.
#[derive(Default)]
pub struct Links(Mutex<Vec<(String, Arc<Link>)>>);

impl Links {
    pub fn add(&self, name: &str, link: Arc<Link>) {
        self.0.lock().expect("no network panicked").push((name.to_owned(), link));
    }

    /// In the order of the controllers.
    pub fn all(&self) -> Vec<(String, Arc<Link>)> {
        self.0.lock().expect("no network panicked").clone()
    }

    pub fn find(&self, name: &str) -> anyhow::Result<Arc<Link>> {
        let all = self.all();
        if let Some((_, link)) = all.iter().find(|(other, _)| other == name) {
            return Ok(link.clone());
        }
        let names: Vec<_> = all.iter().map(|(name, _)| name.as_str()).collect();
        match names.as_slice() {
            [] => bail!("this machine has no network: start it with --device virtio-net"),
            names => bail!("there is no network `{name}`: this machine has {}", names.join(", ")),
        }
    }
}

/// The smallest valid MTU (VIRTIO 1.3, 5.1.4.1).
pub const MIN_MTU: u16 = 68;

/// Called after each change of a link, on the thread that changed it. Notifies the guest.
pub type Watch = Box<dyn Fn() + Send>;

pub struct Link {
    state: Mutex<State>,
    watch: Mutex<Option<Watch>>,
    in_kernel: AtomicU16,
    arrivals: Option<Arc<dyn Arrivals>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    /// The operator's setting.
    plugged: bool,
    /// The backend has a peer.
    connected: bool,
    mtu: Option<u16>,
}

impl Link {
    /// The link is up.
    pub fn new(mtu: Option<u16>) -> Self {
        let state = State { plugged: true, connected: true, mtu };
        Self {
            state: Mutex::new(state),
            watch: Mutex::default(),
            in_kernel: AtomicU16::new(0),
            arrivals: None,
        }
    }

    /// A link whose backend tells of frames that arrive.
    pub fn with_arrivals(mtu: Option<u16>, arrivals: Arc<dyn Arrivals>) -> Self {
        Self { arrivals: Some(arrivals), ..Self::new(mtu) }
    }

    /// `None` without a backend.
    pub fn arrivals(&self) -> Option<&dyn Arrivals> {
        self.arrivals.as_deref()
    }

    /// The number of queue pairs that the kernel serves now (vhost-net), and not this process.
    pub fn kernel_pairs(&self) -> u16 {
        self.in_kernel.load(Ordering::Relaxed)
    }

    /// Counts one more queue pair that the kernel serves, or one less.
    pub fn count_kernel_pair(&self, more: bool) {
        let one = if more { 1 } else { u16::MAX };
        self.in_kernel.fetch_add(one, Ordering::Relaxed);
    }

    /// Whether the link is up: plugged in, with a peer.
    pub fn is_up(&self) -> bool {
        let state = self.state.lock().expect("no network panicked");
        state.plugged && state.connected
    }

    pub fn is_plugged(&self) -> bool {
        self.state.lock().expect("no network panicked").plugged
    }

    pub fn mtu(&self) -> Option<u16> {
        self.state.lock().expect("no network panicked").mtu
    }

    pub fn set_plugged(&self, plugged: bool) {
        self.change(|state| state.plugged = plugged);
    }

    pub fn set_connected(&self, connected: bool) {
        self.change(|state| state.connected = connected);
    }

    /// Fails if `mtu` is too small, or if the link had no MTU: then the guest does not read it.
    pub fn set_mtu(&self, mtu: u16) -> anyhow::Result<()> {
        ensure!(mtu >= MIN_MTU, "mtu {mtu}: too small: the minimum is {MIN_MTU}");
        ensure!(
            self.mtu().is_some(),
            "the guest was started without an MTU, so it cannot change: start it with mtu=N"
        );
        self.change(|state| state.mtu = Some(mtu));
        Ok(())
    }

    /// Calls `watch` after each change from now on, instead of the previous one.
    pub fn watch(&self, watch: Option<Watch>) {
        *self.watch.lock().expect("no network panicked") = watch;
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        // Held until the guest is notified, so that notifications keep the order of changes and the
        // guest never ends up with an old state.
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
    fn is_up_while_both_ends_are_connected_and_reports_changes() {
        let (link, notified) = (Link::new(Some(1500)), Arc::new(AtomicU32::new(0)));
        let count = notified.clone();
        link.watch(Some(Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        })));
        assert!(link.is_up());
        link.set_plugged(true);
        assert_eq!(notified.load(Ordering::Relaxed), 0);
        link.set_plugged(false);
        link.set_connected(false);
        link.set_plugged(true);
        assert!(!link.is_up());
        link.set_connected(true);
        assert!(link.is_up());
        link.set_mtu(9000).unwrap();
        link.set_mtu(9000).unwrap();
        assert!(link.set_mtu(67).is_err(), "there is no such MTU");
        assert_eq!((link.mtu(), notified.load(Ordering::Relaxed)), (Some(9000), 5));
    }

    #[test]
    fn a_link_is_found_by_the_name_of_its_controller() {
        let links = Links::default();
        let said = |name| links.find(name).err().unwrap().to_string();
        assert!(said("virtio-net").contains("--device virtio-net"));
        links.add("virtio-net", Arc::new(Link::new(None)));
        links.add("virtio-net.2", Arc::new(Link::new(Some(1500))));
        assert_eq!(links.find("virtio-net.2").unwrap().mtu(), Some(1500));
        let wanted = "there is no network `eth0`: this machine has virtio-net, virtio-net.2";
        assert_eq!(said("eth0"), wanted);
        let unknown = links.find("virtio-net").unwrap().set_mtu(1400).unwrap_err();
        assert!(unknown.to_string().contains("mtu=N"), "{unknown}");
    }
}
