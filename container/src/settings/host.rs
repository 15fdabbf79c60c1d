//! The resources of the host: processors, memory, space on the volume.

use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// Number of processors that the pod may run on.
    pub processors: u32,
    /// CPU time limit as a number of processors, rounded up. Nothing if unlimited.
    pub quota: Option<u32>,
    /// Free memory of the host, in bytes.
    pub free: u64,
    /// Free memory for the pod in bytes, within the limits of its control groups.
    pub memory: u64,
    /// The host uses ZFS, whose cache counts as used memory but shrinks on demand.
    pub zfs: bool,
    /// Space for the first disk in bytes: free space of the volume, plus the space that the
    /// existing disk already occupies. Nothing without a volume.
    pub free_space: Option<u64>,
    /// Size of the existing disk in bytes.
    pub disk: Option<u64>,
    /// Free space of /storage2 to /storage6 in bytes. Nothing if not mounted.
    pub further_space: [Option<u64>; 5],
}

impl Host {
    /// Reads the resources of the host whose file systems are below `root`, and of the volume.
    pub fn read(root: &Path, volume: &Path) -> Self {
        let limits = Limits::read(root);
        let free = meminfo(&root.join("proc/meminfo"), "MemAvailable").unwrap_or(0);
        Self {
            processors: processors(root, &limits).max(1),
            quota: limits.quota,
            free,
            memory: limits.memory.map_or(free, |it| free.min(it.free)),
            zfs: root.join("proc/spl/kstat/zfs/arcstats").exists(),
            free_space: free_space(volume),
            disk: None,
            further_space: [2, 3, 4, 5, 6]
                .map(|number| free_space(&root.join(format!("storage{number}")))),
        }
    }
}

/// Memory load of the host and of the pod's control group, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryLoad {
    /// Memory of the host in bytes.
    pub total: u64,
    /// Bytes that are free or can be freed at once.
    pub free: u64,
    /// Limit and free bytes of the control group with the least free memory.
    pub group: Option<(u64, u64)>,
    /// Memory pressure: the share of the last ten seconds in which a task waited for memory, in per
    /// cent. Not every kernel reports it.
    pub pressure: Option<f64>,
}

impl MemoryLoad {
    /// Reads the load of the host whose file systems are below `root`. Nothing without
    /// `/proc/meminfo`.
    pub fn read(root: &Path) -> Option<Self> {
        let file = root.join("proc/meminfo");
        let pressure = fs::read_to_string(root.join("proc/pressure/memory")).ok();
        Some(Self {
            total: meminfo(&file, "MemTotal")?,
            free: meminfo(&file, "MemAvailable")?,
            group: Limits::read(root).memory.map(|it| (it.limit, it.free)),
            pressure: pressure.and_then(|text| average(&text)),
        })
    }
}

/// Parses `some avg10=0.00 avg60=...`.
fn average(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    line.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

/// The number of processes in our control group that the kernel killed for lack of memory.
pub fn oom_kills(root: &Path) -> u64 {
    Limits::read(root).oom_kills.unwrap_or(0)
}

/// Bytes that we may write below a folder.
pub fn free_space(folder: &Path) -> Option<u64> {
    let space = rustix::fs::statvfs(folder).ok()?;
    space.f_bavail.checked_mul(space.f_frsize)
}

/// Reads a line of `/proc/meminfo`, in bytes.
fn meminfo(path: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

fn processors(root: &Path, limits: &Limits) -> u32 {
    let text = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let online = text.lines().filter(|line| line.starts_with("processor")).count();
    let online = u32::try_from(online).unwrap_or(u32::MAX);
    let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let allowed = allowed.and_then(|list| set(list.trim()));
    online.min(allowed.unwrap_or(u32::MAX)).min(limits.set.unwrap_or(u32::MAX))
}

/// The length of a processor list like `0-3,8`. Nothing if it is empty or invalid.
fn set(list: &str) -> Option<u32> {
    let mut count = 0_u32;
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

/// The limits of our control groups.
#[derive(Debug, Default)]
struct Limits {
    memory: Option<MemoryLimit>,
    quota: Option<u32>,
    set: Option<u32>,
    oom_kills: Option<u64>,
}

/// A memory limit. The derived order puts the limit with the least free memory first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MemoryLimit {
    free: u64,
    limit: u64,
}

/// Values from here on mean unlimited. Version 1 reports the largest multiple of the page size.
const UNLIMITED: u64 = 1 << 60;

impl MemoryLimit {
    fn new(limit: u64, used: u64) -> Self {
        Self { free: limit.saturating_sub(used), limit }
    }
}

impl Limits {
    fn read(root: &Path) -> Self {
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let top = root.join("sys/fs/cgroup");
        let mut limits = Self::default();
        for line in groups.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(kinds), Some(own)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if kinds.is_empty() {
                let tops = [top.join("unified"), top.clone()];
                let top = tops.iter().find(|top| top.join("cgroup.controllers").exists());
                for group in top.iter().flat_map(|top| chain(top, own)) {
                    limits.version2(&group);
                }
            }
            for kind in kinds.split(',').filter(|kind| ["memory", "cpu", "cpuset"].contains(kind)) {
                // The folder is named after all controllers that share it. Some hosts have links
                // for each.
                let top = [top.join(kinds), top.join(kind)].into_iter().find(|top| top.exists());
                for group in top.iter().flat_map(|top| chain(top, own)) {
                    limits.version1(&group);
                }
            }
        }
        limits
    }

    fn version2(&mut self, group: &Path) {
        let memory = number(&group.join("memory.max")).map(|limit| {
            let used = number(&group.join("memory.current")).unwrap_or(0);
            MemoryLimit::new(limit, used.saturating_sub(cache(group, "inactive_file")))
        });
        self.add_memory(memory);
        let text = fs::read_to_string(group.join("cpu.max")).unwrap_or_default();
        let mut words = text.split_whitespace().map(|word| word.parse().ok());
        self.add_quota(words.next().flatten(), words.next().flatten());
        self.add_cpuset(&group.join("cpuset.cpus.effective"));
        self.add_kills(&group.join("memory.events"));
    }

    fn version1(&mut self, group: &Path) {
        let memory = number(&group.join("memory.limit_in_bytes"));
        let memory = memory.filter(|limit| *limit < UNLIMITED).map(|limit| {
            let used = number(&group.join("memory.usage_in_bytes")).unwrap_or(0);
            MemoryLimit::new(limit, used.saturating_sub(cache(group, "total_inactive_file")))
        });
        self.add_memory(memory);
        // An unlimited group has -1, which does not parse as `u64`.
        let quota = number(&group.join("cpu.cfs_quota_us"));
        self.add_quota(quota, number(&group.join("cpu.cfs_period_us")));
        self.add_cpuset(&group.join("cpuset.effective_cpus"));
        self.add_cpuset(&group.join("cpuset.cpus"));
        self.add_kills(&group.join("memory.oom_control"));
    }

    fn add_memory(&mut self, memory: Option<MemoryLimit>) {
        self.memory = self.memory.into_iter().chain(memory).min();
    }

    fn add_quota(&mut self, quota: Option<u64>, period: Option<u64>) {
        let (Some(quota), Some(period)) = (quota, period) else { return };
        let Some(quota) = (period != 0).then(|| quota.div_ceil(period)) else { return };
        let quota = u32::try_from(quota).unwrap_or(u32::MAX).max(1);
        self.quota = self.quota.into_iter().chain([quota]).min();
    }

    /// Only the first group counts, which is our own. Groups above it include other pods.
    fn add_kills(&mut self, file: &Path) {
        self.oom_kills = self.oom_kills.or_else(|| line(file, "oom_kill"));
    }

    fn add_cpuset(&mut self, file: &Path) {
        let text = fs::read_to_string(file).unwrap_or_default();
        self.set = self.set.into_iter().chain(set(text.trim())).min();
    }
}

/// The folders of our group and of its ancestors, each of which may have a limit. In a container
/// the mount is often our own group although the path is the host's. Then the mount is all that we
/// see.
fn chain(top: &Path, own: &str) -> Vec<PathBuf> {
    let own = own.trim_start_matches('/');
    let plain = !Path::new(own).components().any(|part| part.as_os_str() == "..");
    let below = top.join(own);
    if own.is_empty() || !plain || !below.is_dir() {
        return vec![top.to_owned()];
    }
    below.ancestors().take_while(|group| group.starts_with(top)).map(Path::to_owned).collect()
}

/// Reads a file with one number. Nothing for `max`.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The inactive part of a group's page cache. The kernel reclaims it on demand, and after a large
/// download it is most of the used memory.
fn cache(group: &Path, name: &str) -> u64 {
    line(&group.join("memory.stat"), name).unwrap_or(0)
}

/// The number after a name, in a file with one name per line.
fn line(path: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

#[cfg(test)]
mod test {
    use tempfile::TempDir;

    use super::*;

    /// A host with eight processors and 16 GiB of memory, plus these files.
    fn host(files: &[(&str, &str)]) -> Host {
        Host::read(root(files).path(), Path::new("/does/not/exist"))
    }

    fn root(files: &[(&str, &str)]) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        let cpuinfo: String = (0..8).map(|n| format!("processor\t: {n}\nmodel\t: x\n\n")).collect();
        let usual = [
            ("proc/cpuinfo", cpuinfo.as_str()),
            ("proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable:   16777216 kB\n"),
        ];
        for (path, text) in usual.iter().chain(files) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const GIB: u64 = 1 << 30;

    #[test]
    fn without_cgroups_the_whole_host_is_available() {
        let free = host(&[]);
        assert_eq!((free.processors, free.quota, free.memory), (8, None, 16 * GIB));
        assert!(!free.zfs && free.free_space.is_none());
        assert!(host(&[("proc/spl/kstat/zfs/arcstats", "")]).zfs);
    }

    #[test]
    fn version_2_limits_memory_time_and_processors() {
        let limited = host(&[
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
            ("sys/fs/cgroup/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/memory.current", "5368709120\n"),
            ("sys/fs/cgroup/memory.stat", "anon 1\ninactive_file 4294967296\nactive_file 9\n"),
            ("sys/fs/cgroup/cpu.max", "250000 100000\n"),
            ("sys/fs/cgroup/cpuset.cpus.effective", "0-1,4\n"),
        ]);
        assert_eq!((limited.free, limited.memory), (16 * GIB, 7 * GIB));
        assert_eq!((limited.processors, limited.quota), (3, Some(3)));
    }

    #[test]
    fn version_2_reads_max_as_unlimited() {
        let free = host(&[
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/cgroup.controllers", ""),
            ("sys/fs/cgroup/memory.max", "max\n"),
            ("sys/fs/cgroup/memory.current", "5368709120\n"),
            ("sys/fs/cgroup/cpu.max", "max 100000\n"),
        ]);
        assert_eq!((free.processors, free.quota, free.memory), (8, None, 16 * GIB));
    }

    #[test]
    fn the_lowest_limit_of_nested_groups_applies() {
        let nested = host(&[
            ("proc/self/cgroup", "0::/pods/one/container\n"),
            ("sys/fs/cgroup/cgroup.controllers", ""),
            ("sys/fs/cgroup/pods/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/pods/memory.current", "1073741824\n"),
            ("sys/fs/cgroup/pods/cpu.max", "50000 100000\n"),
            ("sys/fs/cgroup/pods/one/memory.max", "max\n"),
            ("sys/fs/cgroup/pods/one/container/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/pods/one/container/cpu.max", "800000 100000\n"),
        ]);
        assert_eq!((nested.memory, nested.quota), (3 * GIB, Some(1)));
    }

    #[test]
    fn a_missing_cgroup_path_means_the_mount_itself() {
        for own in ["0::/kubepods/x\n", "0::/../x\n"] {
            let own = host(&[
                ("proc/self/cgroup", own),
                ("sys/fs/cgroup/cgroup.controllers", ""),
                ("sys/fs/cgroup/memory.max", "1073741824\n"),
            ]);
            assert_eq!(own.memory, GIB);
        }
    }

    #[test]
    fn version_1_has_a_folder_for_each_controller() {
        let cgroup = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n3:cpuset:/\n1:name=systemd:/\n";
        let limited = host(&[
            ("proc/self/cgroup", cgroup),
            ("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "2147483648\n"),
            ("sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/docker/x/memory.stat", "total_inactive_file 536870912\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "150000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpuset/cpuset.cpus", "0-3\n"),
        ]);
        assert_eq!(limited.memory, GIB + GIB / 2);
        assert_eq!((limited.processors, limited.quota), (4, Some(2)));
    }

    #[test]
    fn out_of_memory_kills_are_counted_in_the_own_cgroup() {
        let own = root(&[
            ("proc/self/cgroup", "0::/pods/one\n"),
            ("sys/fs/cgroup/cgroup.controllers", ""),
            ("sys/fs/cgroup/pods/memory.events", "oom 9\noom_kill 9\n"),
            ("sys/fs/cgroup/pods/one/memory.events", "oom 4\noom_kill 1\noom_group_kill 0\n"),
        ]);
        assert_eq!(oom_kills(own.path()), 1);
        let own = root(&[
            ("proc/self/cgroup", "4:memory:/docker/x\n"),
            (
                "sys/fs/cgroup/memory/docker/x/memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            ),
        ]);
        assert_eq!(oom_kills(own.path()), 2);
        assert_eq!(oom_kills(root(&[]).path()), 0);
    }

    #[test]
    fn huge_and_invalid_limits_are_ignored() {
        let free = host(&[
            ("proc/self/cgroup", "4:memory:/\nnonsense\n0::\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/cgroup.controllers", ""),
            ("sys/fs/cgroup/cpu.max", "x y\n"),
            ("sys/fs/cgroup/cpuset.cpus.effective", "\n"),
            ("proc/self/status", "Name: x\nCpus_allowed_list:\t0-3\n"),
        ]);
        assert_eq!((free.processors, free.quota, free.memory), (4, None, 16 * GIB));
    }

    #[test]
    fn memory_load_is_read_from_host_cgroup_and_pressure() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(MemoryLoad::read(root.path()), None);
        for (path, text) in [
            ("proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n"),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/cgroup.controllers", ""),
            ("sys/fs/cgroup/memory.max", "1000000\n"),
            ("sys/fs/cgroup/memory.current", "300000\n"),
        ] {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let group = Some((1_000_000, 700_000));
        let load = MemoryLoad { total: 4 << 20, free: 1 << 20, group, pressure: None };
        assert_eq!(MemoryLoad::read(root.path()), Some(load));
        let folder = root.path().join("proc/pressure");
        fs::create_dir(&folder).unwrap();
        let text = "some avg10=12.34 avg60=1.00 total=5\nfull avg10=99.00 avg60=0 total=1\n";
        fs::write(folder.join("memory"), text).unwrap();
        assert_eq!(MemoryLoad::read(root.path()).unwrap().pressure, Some(12.34));
    }

    #[test]
    fn free_space_of_the_volume_is_read() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("storage3")).unwrap();
        let host = Host::read(folder.path(), folder.path());
        assert!(host.free_space.is_some());
        assert_eq!(
            host.further_space.map(|space| space.is_some()),
            [false, true, false, false, false]
        );
    }
}
