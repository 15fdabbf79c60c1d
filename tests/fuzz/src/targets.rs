//! The table of all targets. To add a target, add a line.

use std::hint::black_box;
use std::path::Path;
use std::str::from_utf8;
use std::sync::LazyLock;

use devices::registry::KINDS;
use devices::testutil::Bench;
use devices::testutil::hostile::Guest;
use screen::web::Sessions;
use tempfile::TempDir;

use crate::input::Make::{self, Bytes, Choice, Own, Words};
use crate::{
    Target, chips, every_kind, fw_cfg, guest, kernel, lan, medium, migration, moving, msix, pod,
    snapshot, state, swtpm, words,
};

macro_rules! hostile {
    ($($name:ident: $path:literal,)*) => {
        $(#[path = $path] mod $name;)*
    };
}

hostile! {
    hostile_agent: "../../../container/tests/hostile_agent/mod.rs",
    hostile_ahci: "../../../devices/tests/hostile_ahci/mod.rs",
    hostile_answer: "../../../container/tests/hostile_answer/mod.rs",
    hostile_browser: "../../../vmm/screen/tests/hostile_browser/mod.rs",
    hostile_client: "../../../vmm/tests/hostile_client/mod.rs",
    hostile_clipboard: "../../../devices/tests/hostile_clipboard/mod.rs",
    hostile_desktop: "../../../container/tests/hostile_desktop/mod.rs",
    hostile_download: "../../../container/tests/hostile_download/mod.rs",
    hostile_e1000e: "../../../devices/tests/hostile_e1000e/mod.rs",
    hostile_environment: "../../../container/tests/hostile_environment/mod.rs",
    hostile_frames: "../../../container/tests/hostile_frames/mod.rs",
    hostile_guest: "../../../container/tests/hostile_guest/mod.rs",
    hostile_hda: "../../../devices/tests/hostile_hda/mod.rs",
    hostile_image: "../../../devices/tests/hostile_image/mod.rs",
    hostile_media: "../../../container/tests/hostile_media/mod.rs",
    hostile_message: "../../../vmm/screen/tests/hostile_message/mod.rs",
    hostile_net: "../../../devices/tests/hostile_net/mod.rs",
    hostile_nvme: "../../../devices/tests/hostile_nvme/mod.rs",
    hostile_picture: "../../../vmm/screen/tests/hostile_picture/mod.rs",
    hostile_qmp: "../../../container/tests/hostile_qmp/mod.rs",
    hostile_reports: "../../../container/tests/hostile_reports/mod.rs",
    hostile_setup_disk: "../../../container/tests/hostile_setup_disk/mod.rs",
    hostile_share: "../../../share/tests/hostile_share/mod.rs",
    hostile_storage: "../../../devices/tests/hostile_storage/mod.rs",
    hostile_upgrade: "../../../container/tests/hostile_upgrade/mod.rs",
    hostile_usb_host: "../../../devices/tests/hostile_usb_host/mod.rs",
    hostile_user: "../../../vmm/tests/hostile_user/mod.rs",
    hostile_viewer: "../../../vmm/screen/tests/hostile_viewer/mod.rs",
    hostile_virtio: "../../../devices/tests/hostile_virtio/mod.rs",
    hostile_volume: "../../../container/tests/hostile_volume/mod.rs",
    hostile_xhci: "../../../devices/tests/hostile_xhci/mod.rs",
}

pub const TARGETS: &[Target] = &[
    // Devices with rings, each under a hostile driver.
    target("ahci", 4096, Bytes, |it| {
        hostile_ahci::run(folder(), it.iter().copied());
    }),
    target("balloon", 4096, Bytes, |it| virtio("virtio-balloon", it)),
    target("blk", 4096, Bytes, |it| virtio("virtio-blk", it)),
    target("gpu", 4096, Bytes, |it| virtio("virtio-gpu", it)),
    target("rng", 4096, Bytes, |it| virtio("virtio-rng", it)),
    target("scsi", 4096, Bytes, |it| virtio("virtio-scsi", it)),
    target("serial", 4096, Bytes, |it| virtio("virtio-serial", it)),
    target("net", 4096, Bytes, |it| {
        hostile_net::run(it.iter().copied());
    }),
    target("e1000e", 4096, Bytes, |it| {
        hostile_e1000e::run(it.iter().copied());
    }),
    target("hda", 4096, Bytes, |it| {
        hostile_hda::run(it.iter().copied());
    }),
    target("clipboard", 4096, Bytes, |it| {
        hostile_clipboard::run(it.iter().copied());
    }),
    target("lease", 4096, Bytes, |it| hostile_net::run_with_vhost(it.iter().copied())),
    target("nvme", 4096, Bytes, |it| {
        hostile_nvme::run(folder(), it.iter().copied());
    }),
    target("storage", 4096, Bytes, |it| hostile_storage::run(it.iter().copied())),
    target("usb-host", 4096, Bytes, |it| hostile_usb_host::run(it.iter().copied())),
    target("xhci", 4096, Bytes, |it| hostile_xhci::run(it.iter().copied())),
    // All devices on one board, and the MSI-X table.
    target("bus", 4096, Bytes, bus),
    target("msix", 4096, Bytes, msix::run),
    target("state", 4096, Bytes, |it| state::run(&every_device(), it)),
    // Chips, each alone under a hostile guest, and the TPM between a guest and a lying swtpm.
    target("flash", 4096, Bytes, |it| chips::run(&chips::FLASH, folder(), it)),
    target("hpet", 4096, Bytes, |it| chips::run(&chips::HPET, folder(), it)),
    target("rtc", 4096, Bytes, |it| chips::run(&chips::RTC, folder(), it)),
    target("i8042", 4096, Bytes, |it| chips::run(&chips::I8042, folder(), it)),
    target("pm", 4096, Bytes, |it| chips::run(&chips::PM, folder(), it)),
    target("fw-cfg", 4096, Bytes, fw_cfg::run),
    target("tpm", 2048, Bytes, |it| swtpm::run(folder(), it)),
    // Parsers of data from outside.
    target("image", 1024, Bytes, |it| hostile_image::run(folder(), it.iter().copied())),
    target("migration", 1 << 16, Own(migration::make), migration::run),
    target("moving-pods", 4096, Own(moving::make), |it| moving::run(folder(), it)),
    target("snapshot", 256, Bytes, |it| snapshot::open(folder(), it)),
    target("kernel", 0x2000, Own(kernel::make), kernel::load),
    target("medium", 4096, Own(medium::make), |it| medium::look(folder(), it)),
    target("media", 512, Bytes, hostile_media::descriptors),
    target("catalog", 2048, Bytes, hostile_media::catalog),
    target("wim", 4096, Words(words::wim), wim),
    target("setup-disk", 4096, Own(hostile_setup_disk::paths), |it| {
        hostile_setup_disk::make(it);
    }),
    target("volume", 512, Bytes, volume),
    target("download", 4096, Words(words::download), hostile_download::read),
    target("upgrade", 4096, Bytes, |it| {
        hostile_upgrade::read(it);
    }),
    target("config", 4096, Choice(words::user), config),
    target("control", 4096, Words(words::control), control),
    target("answer", 4096, Choice(words::answer), hostile_answer::change),
    target("reports", 4096, Words(words::reports), |it| {
        hostile_reports::read(it);
    }),
    target("settings", 4096, Choice(words::environment), settings),
    // The guest's requests and answers to the pod.
    target("agent", 4096, Words(words::agent), hostile_agent::answer_with),
    target("dhcp", 1500, Own(guest::dhcp), hostile_guest::dhcp),
    target("dns", 1500, Own(guest::dns), hostile_guest::dns),
    target("resolv", 4096, Words(words::resolvers), hostile_guest::resolv),
    target("frames", 4096, Own(guest::frames), hostile_frames::frames),
    target("segments", 4096, Own(guest::frames), hostile_frames::segments),
    target("arp", 1500, Own(lan::arp), lan::handle_arp),
    target("neighbors", 1500, Own(lan::neighbor), lan::handle_neighbor),
    target("share", 4096, Bytes, |it| hostile_share::run(folder(), it.iter().copied())),
    // Requests to the pod, at the web port and at its socket.
    target("api", 4096, Words(words::api), |it| pod::api(folder(), it)),
    target("inquiry", 4096, Words(words::inquiry), |it| pod::inquiry(folder(), it)),
    // Browsers and guests at the gateway of the remote desktop.
    target("desktop", 4096, Choice(desktop), |it| {
        hostile_desktop::send(it);
    }),
    // Clients of QEMU's control protocols.
    target("qmp", 4096, Words(words::qmp), |it| {
        hostile_qmp::talk(it);
    }),
    // Clients of the screen: sessions, requests, parsers alone; and the pictures they get.
    target("rfb", 4096, Choice(words::viewer), |it| hostile_viewer::Bench::shared().talk(it)),
    target("web", 4096, Choice(words::browser), |it| hostile_browser::Bench::shared().talk(it)),
    target("message", 4096, Own(guest::messages), |it| {
        hostile_message::read(it);
    }),
    target("picture", 1024, Bytes, |it| {
        hostile_picture::run(it.iter().copied());
    }),
];

fn desktop() -> Vec<Vec<u8>> {
    [words::desktop(), vec![hostile_desktop::REQUEST.to_vec()]].concat()
}

/// Broken targets, for tests of the runner.
pub(crate) const BROKEN: &[Target] = &[
    target("panics", 64, Bytes, |it| assert!(it.len() < 40, "broken on purpose")),
    target("hangs", 64, Bytes, |it| {
        if it.len() > 40 {
            loop {
                black_box(it);
            }
        }
    }),
    target("grows", 64, Bytes, |it| {
        // Much at once or nothing, because hosts need their memory for other things.
        black_box(vec![1_u8; if it.len() < 40 { 1 } else { it.len() << 30 }]);
    }),
    target("dies-elsewhere", 64, Bytes, |it| {
        let length = it.len();
        std::thread::spawn(move || assert!(length < 40, "broken on purpose")).join().ok();
    }),
];

const fn target(name: &'static str, max_length: usize, make: Make, run: fn(&[u8])) -> Target {
    Target { name, run, max_length, make }
}

/// The folder for the files of this process's target.
fn folder() -> &'static Path {
    static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));
    FOLDER.path()
}

fn virtio(kind: &str, bytes: &[u8]) {
    hostile_virtio::run(kind, folder(), bytes.iter().copied());
}

/// A board with a device of every kind, switched on.
fn every_device() -> Bench {
    let mut bench = Bench::new(1 << 16);
    for kind in KINDS {
        every_kind::add(&mut bench, kind, folder());
    }
    bench.board.run(Vec::new()).expect("power-on");
    bench
}

/// Accesses to all devices, which are then parked, resumed, and reset.
fn bus(bytes: &[u8]) {
    let bench = every_device();
    // The first byte is the number of accesses before firmware sets up all functions.
    let Some((firmware, bytes)) = bytes.split_first() else { return };
    let mut guest = Guest::new(&bench, bytes.iter().copied());
    if (0..*firmware).all(|_| guest.step()) {
        let mut guest = guest.open();
        while guest.step() {}
    }
    let saved = bench.board.park();
    bench.board.run(saved).expect("what was just saved");
    bench.board.reset().expect("power-on again");
}

fn config(bytes: &[u8]) {
    let Some((option, text)) = bytes.split_first() else { return };
    let Ok(text) = from_utf8(text) else { return };
    hostile_user::read(usize::from(*option), text);
}

fn wim(bytes: &[u8]) {
    match from_utf8(bytes) {
        Ok(text) => hostile_media::xml(text),
        Err(_) => hostile_media::wim(bytes),
    }
}

fn volume(bytes: &[u8]) {
    hostile_volume::judge_disk(bytes);
    hostile_volume::read_manifest(bytes);
    if let Ok(text) = from_utf8(bytes) {
        hostile_volume::name_medium(text);
        let sessions = Sessions::default();
        sessions.resume(text);
        assert!(sessions.text().len() < 4096, "a volume gives more sessions than it is to keep");
    }
}

fn settings(bytes: &[u8]) {
    let Some((variable, text)) = bytes.split_first() else { return };
    let Ok(text) = from_utf8(text) else { return };
    hostile_environment::set(usize::from(*variable), text);
}

fn control(bytes: &[u8]) {
    static MACHINE: LazyLock<hostile_client::Machine> = LazyLock::new(hostile_client::Machine::new);
    if let Ok(text) = from_utf8(bytes) {
        hostile_client::typed(text);
    }
    MACHINE.serve(bytes);
}
