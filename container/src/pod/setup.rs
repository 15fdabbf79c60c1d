//! The set-up disk of a machine. It is pulled out when Windows first boots from its own disk: by
//! then its setup has copied everything.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use host::size::Size;
use vmm::control::Command;

use super::machine_client;
use crate::settings::Settings;
use crate::settings::host::MemoryLoad;
use crate::settings::value::Value as _;
use crate::setup_disk::{self, DiskMemory, SetupDisk};
use crate::story::Story;

/// The disk with the user's files, unless a person installs Windows, or there are none. `memory` is
/// that of the machine.
pub(super) fn prepare(
    settings: &Settings,
    memory: u64,
    root: &Path,
    story: &Story,
) -> anyhow::Result<Option<SetupDisk>> {
    if settings.windows.manual {
        return Ok(None);
    }
    let items = setup_disk::users_items(root, &settings.storage.folder)?;
    if items.is_empty() {
        return Ok(None);
    }
    let count = items.len();
    let layout = setup_disk::lay_out(items)?;
    if let Some(load) = MemoryLoad::read(root) {
        check_memory(layout.bytes(), memory, &load, story)?;
    }
    story.info(&format!("{count} files and folders of yours are on the set-up disk"));
    SetupDisk::write(&layout).map(Some)
}

/// Fails if the disk alone does not fit into memory, and warns if it does not beside the machine.
fn check_memory(disk: u64, machine: u64, load: &MemoryLoad, story: &Story) -> anyhow::Result<()> {
    let free = load.group.map_or(load.free, |(_, free)| free.min(load.free));
    let [shown, has, left] = [disk, machine, free].map(|bytes| Size(bytes >> 20 << 20).show());
    ensure!(
        disk < free,
        "the files of /oem take {shown} of memory until Windows is installed, and {left} are free: \
         raise the container's memory limit, or copy large files through the network later"
    );
    if machine <= free && disk > free - machine {
        story.warn(&format!(
            "the files of /oem take {shown} of memory until Windows is installed, the machine \
             {has}, and {left} are free: raise the container's memory limit, or lower RAM_SIZE"
        ));
    }
    Ok(())
}

/// The disk in the machine. Its memory is the pod's.
pub struct PluggedDisk {
    pub memory: DiskMemory,
    /// The device's name.
    pub name: String,
    pub control: PathBuf,
}

impl PluggedDisk {
    /// Frees the disk's memory when the machine has released it.
    pub async fn unplug(self) {
        let Self { memory, name, control } = self;
        let detached = machine_client::ask(&control, Command::Detach { name }).await;
        match detached.and_then(|_| memory.free()) {
            Ok(()) => tracing::info!("the set-up disk is pulled out: Windows has copied it"),
            Err(error) => tracing::warn!("the set-up disk stays in the machine: {error:#}"),
        }
    }
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::thread;

    use super::super::machine::{self, Parts};
    use crate::plan::Plan;

    use super::*;

    fn empty() -> SetupDisk {
        setup_disk::lay_out(Vec::new()).and_then(|layout| SetupDisk::write(&layout)).unwrap()
    }

    #[test]
    fn the_disk_comes_after_the_media_and_does_not_boot() {
        for (bus, medium, name) in
            [("ide", "ahci-cdrom", "usb-storage"), ("usb", "usb-storage", "usb-storage.2")]
        {
            let environment = [("VERSION", "probe"), ("MEDIA_TYPE", bus)];
            let environment = environment.map(|(name, text)| (name.into(), text.into())).into();
            let plan = Plan::make(&environment, Path::new("/")).unwrap();
            let parts = Parts {
                firmware: Some(("/code".into(), "/vars".into())),
                media: vec![PathBuf::from("/a.iso").into()],
                setup_disk: Some(empty()),
                ..Parts::default()
            };
            let config = machine::config(&plan.input.settings, &plan.sizes, &parts).unwrap();
            let path = parts.setup_disk.unwrap().path();
            assert_eq!(machine::name_of(&config, &path).as_deref(), Some(name));
            assert_eq!(machine::name_of(&config, Path::new("/none")), None);
            let machine = serde_json::to_value(&config).unwrap();
            assert_eq!(machine["boot"], serde_json::json!([medium]));
            let mut disks = machine["device"].as_array().unwrap().iter();
            assert!(disks.any(|it| it["kind"] == medium && it["path"] == "/a.iso"), "{machine}");
            let disk = disks.find(|it| it["kind"] == "usb-storage").unwrap();
            assert!(disk["removable"] == true && disk["readonly"] == true, "{disk}");
        }
    }

    /// Unplugs a disk from a machine that gives this answer. Returns the question and the bytes
    /// that the disk then has.
    async fn unplugged(answer: &'static str) -> (String, u64) {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("vmm.sock");
        let listener = UnixListener::bind(&control).unwrap();
        let machine = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = String::new();
            BufReader::new(&stream).read_line(&mut question).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            question
        });
        let disk = empty();
        let inherited = File::open(disk.path()).unwrap();
        let memory = disk.close();
        PluggedDisk { memory, name: "usb-storage.2".into(), control }.unplug().await;
        (machine.join().unwrap(), inherited.metadata().unwrap().len())
    }

    #[test]
    fn a_disk_that_does_not_fit_into_memory_is_reported_before_it_is_made() {
        let of = |disk: u64, machine: u64, group| {
            let load = MemoryLoad { free: 8 << 30, group, ..MemoryLoad::default() };
            let story = Story::new();
            let checked = check_memory(disk << 30, machine << 30, &load, &story);
            let lines = story.lines(0).0;
            (checked.map_err(|it| it.to_string()), lines.first().map(|it| it.text.clone()))
        };
        assert_eq!(of(1, 4, None), (Ok(()), None));
        let (checked, warning) = of(2, 4, Some((6 << 30, 5 << 30)));
        assert!(checked.is_ok() && warning.unwrap().contains("take 2G of memory until"));
        let error = of(2, 4, Some((6 << 30, 1 << 30))).0.unwrap_err();
        assert!(error.contains("and 1G are free: raise the container's memory limit"), "{error}");
    }

    #[tokio::test]
    async fn its_memory_is_free_when_the_machine_has_released_it() {
        let (question, length) = unplugged("{\"ok\":{}}\n").await;
        assert!(question.contains("detach") && question.contains("usb-storage.2"), "{question}");
        assert_eq!(length, 0);
        let (_, length) = unplugged("{\"error\":\"no\"}\n").await;
        assert!(length > 0);
    }
}
