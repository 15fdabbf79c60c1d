//! A host in a folder: four processors, 16 GiB of free memory, and a volume.

use std::fs;
use std::path::Path;

use container::plan::Plan;

pub(crate) struct Host(tempfile::TempDir);

impl Host {
    pub(crate) fn make() -> Self {
        let root = tempfile::tempdir().unwrap();
        for folder in ["proc", "storage", "usr/share/zoneinfo/Europe"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let processors: String = (0..4).map(|number| format!("processor: {number}\n")).collect();
        fs::write(root.path().join("proc/cpuinfo"), processors).unwrap();
        fs::write(root.path().join("proc/meminfo"), "MemAvailable: 16777216 kB\n").unwrap();
        Self(root)
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }
}

pub(crate) fn warnings(plan: &Plan) -> Vec<&str> {
    plan.warnings.iter().map(String::as_str).collect()
}
