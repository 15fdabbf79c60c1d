//! The set-up disk of a running machine. It is pulled out when Windows first boots from its own
//! disk: by then its setup has copied everything.

use std::path::PathBuf;

use vmm::control::Command;

use super::machine_client;
use crate::setup_disk::DiskMemory;

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
    use crate::setup_disk::SetupDisk;

    use super::*;

    #[test]
    fn the_disk_comes_after_the_media_and_does_not_boot() {
        let environment = [("VERSION".into(), "probe".into())].into();
        let plan = Plan::make(&environment, Path::new("/")).unwrap();
        let parts = Parts {
            firmware: Some(("/code".into(), "/vars".into())),
            media: vec!["/a.iso".into()],
            setup_disk: Some(SetupDisk::make(Vec::new()).unwrap()),
            ..Parts::default()
        };
        let config = machine::config(&plan.input.settings, &plan.sizes, &parts).unwrap();
        let path = parts.setup_disk.unwrap().path();
        assert_eq!(machine::name_of(&config, &path).as_deref(), Some("usb-storage.2"));
        assert_eq!(machine::name_of(&config, Path::new("/none")), None);
        let machine = serde_json::to_value(&config).unwrap();
        assert_eq!(machine["boot"], serde_json::json!(["usb-storage"]));
        let mut disks = machine["device"].as_array().unwrap().iter();
        let disk = disks.rfind(|it| it["kind"] == "usb-storage").unwrap();
        assert!(disk["removable"] == true && disk["readonly"] == true, "{disk}");
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
        let disk = SetupDisk::make(Vec::new()).unwrap();
        let inherited = File::open(disk.path()).unwrap();
        let memory = disk.close();
        PluggedDisk { memory, name: "usb-storage.2".into(), control }.unplug().await;
        (machine.join().unwrap(), inherited.metadata().unwrap().len())
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
