//! Computes the privileges that a machine needs inside its jail: system calls besides those that
//! every machine makes, and files that it opens or removes later.

use std::path::{Path, PathBuf};

use host::listen::{Address, UnixAddress};
use host::net::Network;
use host::stream::Stream;
use jail::{Needs, PathAccess, Paths, Restrictions};
use rustix::termios::isatty;

use crate::config::Config;
use crate::kvm::KvmSupport;
use crate::machine::Machine;

/// The machine must be built and switched off.
pub fn confine(machine: &Machine) -> anyhow::Result<Restrictions> {
    // The jail hides the files that this reads: fill its cache now.
    KvmSupport::of_this_host();
    let config = &machine.config;
    jail::enter(&config.jail, needs(config, machine), &paths(config, machine))
}

/// The system calls that this machine makes besides those that all machines make.
fn needs(config: &Config, machine: &Machine) -> Needs {
    let networks = config.device.iter().filter_map(|device| device.network());
    let mut needs = Needs { rings: !machine.shared().disks.all().is_empty(), ..Needs::default() };
    for network in networks {
        needs.network = true;
        // A connection to passt may have to be made again.
        needs.connect |= matches!(network, Network::Passt(_));
    }
    needs
}

/// The files that the machine opens later, or removes at its end.
fn paths(config: &Config, machine: &Machine) -> Paths {
    let mut paths = Paths::default();
    for disk in machine.shared().disks.all() {
        let what = if disk.geometry().read_only { PathAccess::Read } else { PathAccess::Write };
        paths.add_folder_of(&disk.path, what);
    }
    for tray in machine.shared().disks.trays() {
        if let Some(medium) = tray.medium() {
            paths.add_folder_of(&medium.path, PathAccess::Read);
        }
    }
    for folder in config.jail.folders.iter().flat_map(|folders| &folders.0) {
        paths.add(folder, PathAccess::Write);
    }
    for socket in sockets(config) {
        let folder = socket.parent().filter(|it| !it.as_os_str().is_empty());
        paths.add(folder.unwrap_or(Path::new(".")), PathAccess::Remove);
    }
    let web = config.web.iter().flat_map(|web| [&web.tls_cert, &web.tls_key]);
    let vnc = config.vnc.iter().flat_map(|vnc| [&vnc.tls_cert, &vnc.tls_key]);
    for file in web.chain(vnc).flatten() {
        paths.add_folder_of(file, PathAccess::Read);
    }
    if isatty(rustix::stdio::stdout()) {
        // The terminal is opened again, with a file description of our own.
        paths.add(Path::new("/proc/self/fd/1"), PathAccess::Write);
    }
    // The RTC reads the host's time zone at each reset.
    for zone in ["/etc/localtime", "/usr/share/zoneinfo"] {
        paths.add(Path::new(zone), PathAccess::Read);
    }
    if let Some(zone) = std::env::var_os("TZ") {
        let zone = Path::new("/usr/share/zoneinfo").join(zone);
        paths.add(&zone, PathAccess::Read);
    }
    paths
}

/// The socket files that this process creates.
fn sockets(config: &Config) -> Vec<PathBuf> {
    let control = config.control.iter().filter_map(|control| match control {
        UnixAddress::Path(path) => Some(path.clone()),
        UnixAddress::Inherited(_) => None,
    });
    let web = config.web.iter().filter_map(|web| web.address.as_ref());
    let vnc = config.vnc.iter().filter_map(|vnc| vnc.address.as_ref());
    let screens = web.chain(vnc).filter_map(|address| match address {
        Address::Unix(path) => Some(path.clone()),
        Address::Tcp(_) | Address::Inherited(_) => None,
    });
    let first = config.serial.iter();
    let streams = first.chain(config.device.iter().filter_map(|device| device.stream()));
    let streams = streams.filter_map(|stream| match stream {
        Stream::Socket(path) => Some(path.clone()),
        Stream::None | Stream::Stdio | Stream::File(_) | Stream::Clipboard => None,
    });
    control.chain(screens).chain(streams).collect()
}
