//! The names of the pod's `/etc/hosts` (hosts(5)). `--add-host`, `extra_hosts` and `hostAliases`
//! are written there, and no name server knows them.

use std::net::IpAddr;

/// Further lines are ignored.
const MAX_LINES: usize = 4096;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hosts(Vec<(String, IpAddr)>);

impl Hosts {
    /// Parses the file. Invalid lines are ignored, and so are loopback addresses: the guest would
    /// reach itself with them.
    pub fn read(text: &str) -> Self {
        let mut all = Vec::new();
        for line in text.lines().take(MAX_LINES) {
            let line = line.split('#').next().unwrap_or_default();
            let mut words = line.split_whitespace();
            let Some(address) = words.next().and_then(|word| word.parse::<IpAddr>().ok()) else {
                continue;
            };
            if address.is_loopback() || address.is_multicast() || address.is_unspecified() {
                continue;
            }
            let name = |word: &str| word.trim_end_matches('.').to_ascii_lowercase();
            all.extend(words.map(|word| (name(word), address)));
        }
        Self(all)
    }

    /// `name` must be in lower case.
    pub fn addresses(&self, name: &str) -> impl Iterator<Item = IpAddr> {
        self.0.iter().filter(move |(known, _)| known == name).map(|(_, address)| *address)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn reads_hosts_files_of_docker_and_kubernetes() {
        let hosts = Hosts::read(
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1 localhost\n\
             fe00::0\tip6-mcastprefix\nff02::1 ip6-allnodes\n10.244.0.7\twindows-0\n\n\
             192.0.2.9 Files.example.org. files # the share\n2001:db8::9 files\nnonsense here\n",
        );
        let addresses = |name: &str| {
            hosts.addresses(name).map(|address| address.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(addresses("files"), ["192.0.2.9", "2001:db8::9"]);
        assert_eq!(addresses("files.example.org"), ["192.0.2.9"]);
        assert_eq!(addresses("windows-0"), ["10.244.0.7"]);
        for name in ["localhost", "ip6-allnodes", "share", "here", ""] {
            assert!(addresses(name).is_empty(), "{name}");
        }
    }
}
