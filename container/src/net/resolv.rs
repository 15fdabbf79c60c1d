//! The pod's resolvers, from `/etc/resolv.conf` (resolv.conf(5)).

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

// The limits of glibc.
const MAX_SERVERS: usize = 3;
const MAX_DOMAINS: usize = 32;
const MAX_DOTS: u8 = 15;
const MAX_SECONDS: u8 = 30;
const MAX_ATTEMPTS: u8 = 5;
/// Larger files are not read.
const MAX_FILE_BYTES: u64 = 64 << 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolv {
    /// Name servers, in the order in which they are asked.
    pub servers: Vec<IpAddr>,
    pub search: Vec<String>,
    /// A name with at least this number of dots is asked as it is before search domains are tried.
    pub dots: u8,
    /// The maximum time for an answer of a server.
    pub timeout: Duration,
    /// The number of attempts per server.
    pub attempts: u8,
}

impl Default for Resolv {
    fn default() -> Self {
        let timeout = Duration::from_secs(5);
        Self { servers: Vec::new(), search: Vec::new(), dots: 1, timeout, attempts: 2 }
    }
}

impl Resolv {
    /// Parses the file. Invalid entries are ignored, as in glibc.
    pub fn read(text: &str) -> Self {
        let mut resolv = Self::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => {
                    let server = words.next().and_then(|word| word.parse::<IpAddr>().ok());
                    let room = resolv.servers.len() < MAX_SERVERS;
                    resolv.servers.extend(server.filter(|_| room));
                }
                // The last `search` or `domain` line counts.
                Some("search" | "domain") => {
                    let domain = |word: &str| word.trim_matches('.').to_ascii_lowercase();
                    let domains = words.map(domain).filter(|domain| is_domain(domain));
                    resolv.search = domains.take(MAX_DOMAINS).collect();
                }
                Some("options") => words.for_each(|word| resolv.option(word)),
                _ => {}
            }
        }
        resolv
    }

    fn option(&mut self, word: &str) {
        let Some((name, number)) = word.split_once(':') else { return };
        let Ok(number) = number.parse::<u8>() else { return };
        match name {
            "ndots" => self.dots = number.min(MAX_DOTS),
            "timeout" => self.timeout = Duration::from_secs(number.clamp(1, MAX_SECONDS).into()),
            "attempts" => self.attempts = number.clamp(1, MAX_ATTEMPTS),
            _ => {}
        }
    }
}

fn is_domain(text: &str) -> bool {
    let label = |label: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        (1..=63).contains(&label.len()) && label.bytes().all(plain)
    };
    text.len() <= 253 && text.split('.').all(label)
}

/// A parsed file, which is read again when it has changed.
pub struct File<T = Resolv> {
    path: PathBuf,
    read: fn(&str) -> T,
    last: Mutex<(Option<FileVersion>, Arc<T>)>,
}

/// Properties of a file that change with its content.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl<T: Default> File<T> {
    pub fn new(path: impl Into<PathBuf>, read: fn(&str) -> T) -> Self {
        Self { path: path.into(), read, last: Mutex::default() }
    }

    /// The current content. While the file cannot be read, the last known content.
    pub fn now(&self) -> Arc<T> {
        let mut last = self.last.lock().expect("nothing panics while it is read");
        let stamp = fs::metadata(&self.path).ok().map(|it| FileVersion {
            inode: it.ino(),
            size: it.len(),
            changed: (it.ctime(), it.ctime_nsec()),
        });
        if stamp.is_some_and(|it| it.size <= MAX_FILE_BYTES)
            && stamp != last.0
            && let Ok(text) = fs::read(&self.path)
        {
            *last = (stamp, Arc::new((self.read)(&String::from_utf8_lossy(&text))));
        }
        last.1.clone()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn reads_resolv_conf_of_kubernetes_and_docker() {
        let pod = Resolv::read(
            "search win.svc.cluster.local svc.cluster.local Cluster.Local.\n\
             nameserver 10.96.0.10\noptions ndots:5\n",
        );
        assert_eq!(pod.servers, ["10.96.0.10".parse::<IpAddr>().unwrap()]);
        assert_eq!(pod.search, ["win.svc.cluster.local", "svc.cluster.local", "cluster.local"]);
        assert_eq!((pod.dots, pod.timeout.as_secs(), pod.attempts), (5, 5, 2));
        let docker = Resolv::read("# made\nnameserver 127.0.0.11\noptions edns0 ndots:0\n");
        assert_eq!((docker.servers.len(), docker.dots), (1, 0));
    }

    #[test]
    fn ignores_invalid_lines() {
        let resolv = Resolv::read(
            "nameserver\nnameserver x\nnameserver fd00::1\nnameserver 1.1.1.1\nnameserver 2.2.2.2\n\
             nameserver 3.3.3.3\ndomain a\nsearch b..c ok \u{e9} -\noptions ndots:99 timeout:0 \
             attempts:x ndots\n",
        );
        assert_eq!((resolv.servers.len(), resolv.dots), (3, 15));
        assert_eq!(resolv.search, ["ok", "-"]);
        assert_eq!((resolv.timeout.as_secs(), resolv.attempts), (1, 2));
    }

    #[test]
    fn a_changed_file_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resolv.conf");
        let file = File::new(&path, Resolv::read);
        assert_eq!(*file.now(), Resolv::default());
        fs::write(&path, "search one\n").unwrap();
        assert_eq!(file.now().search, ["one"]);
        fs::write(folder.path().join("new"), "search other\n").unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
        assert_eq!(file.now().search, ["other"]);
        fs::remove_file(&path).unwrap();
        assert_eq!(file.now().search, ["other"]);
    }
}
