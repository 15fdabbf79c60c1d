//! Ports of the pod that are forwarded to the guest. They listen on all addresses of the pod,
//! including its loopback, to which `kubectl port-forward` connects.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::settings::words::Protocol;
use crate::settings::{RDP, Settings};

const BACKLOG: i32 = 128;

#[derive(Debug, Default)]
pub struct Listeners {
    pub tcp: Vec<TcpListener>,
    pub udp: Vec<UdpSocket>,
}

/// The forwarded ports: Remote Desktop and USER_PORTS, without those that stay with the pod.
pub fn ports(settings: &Settings) -> Vec<(u16, Protocol)> {
    let rdp = [(RDP, Protocol::Tcp), (RDP, Protocol::Udp)];
    let kept = settings.kept_ports();
    let mut ports = Vec::new();
    for port in rdp.into_iter().chain(settings.network.user_ports.0.iter().copied()) {
        if ports.contains(&port) {
            continue;
        }
        match kept.iter().find(|(number, protocol, _)| (*number, *protocol) == port) {
            None => ports.push(port),
            Some((.., reason)) => {
                tracing::warn!("network: port {} stays with the pod: {reason}", port.0);
            }
        }
    }
    ports
}

impl Listeners {
    /// Listens on these ports. Ports that cannot be opened are logged and left out.
    pub fn open(ports: &[(u16, Protocol)]) -> Self {
        let mut listeners = Self::default();
        for (number, protocol) in ports {
            let both: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
            for address in both {
                match (listen(SocketAddr::new(address, *number), *protocol), protocol) {
                    (Ok(socket), Protocol::Tcp) => listeners.tcp.push(socket.into()),
                    (Ok(socket), Protocol::Udp) => listeners.udp.push(socket.into()),
                    // A pod without IPv6.
                    (Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL), _) if address.is_ipv6() => {}
                    (Err(error), _) => warn(*number, *protocol, error),
                }
            }
        }
        listeners
    }
}

fn warn(number: u16, protocol: Protocol, error: Errno) {
    let protocol = match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    let way_out = match error {
        Errno::ADDRINUSE => "another program in the pod uses it: add the port to HOST_PORTS",
        Errno::ACCESS => {
            "for ports below 1024, add --sysctl net.ipv4.ip_unprivileged_port_start=0 (or, as \
             root, --cap-add NET_BIND_SERVICE), or choose a higher port"
        }
        _ => "it is not forwarded to the guest",
    };
    tracing::warn!("network: port {number}/{protocol}: {error}: {way_out}");
}

fn listen(address: SocketAddr, protocol: Protocol) -> Result<OwnedFd, Errno> {
    let v4 = address.is_ipv4();
    let family = if v4 { AddressFamily::INET } else { AddressFamily::INET6 };
    let kind = match protocol {
        Protocol::Tcp => SocketType::STREAM,
        Protocol::Udp => SocketType::DGRAM,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, kind, flags, None)?;
    if !v4 {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    if protocol == Protocol::Tcp {
        // Closed connections of a former pod do not block the port.
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    rustix::net::bind(&socket, &address)?;
    if protocol == Protocol::Tcp {
        rustix::net::listen(&socket, BACKLOG)?;
    }
    Ok(socket)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::translate::monitor::Monitor;
    use crate::settings::value::{Value as _, Within};
    use crate::settings::words::Ports;

    #[test]
    fn forwards_remote_desktop_and_user_ports_except_reserved() {
        let mut settings = Settings::defaults();
        settings.screen.vnc_port = Some(Within(5900));
        let rdp = vec![(3389, Protocol::Tcp), (3389, Protocol::Udp)];
        assert_eq!(ports(&settings), rdp);
        settings.network.user_ports = Ports::read("22,3389,8006,5900,7000/udp,8006/udp,9").unwrap();
        settings.network.host_ports = Ports::read("9,3389/udp").unwrap();
        let wanted = [(3389, Protocol::Tcp), (22, Protocol::Tcp)];
        let wanted = [&wanted[..], &[(7000, Protocol::Udp), (8006, Protocol::Udp)]].concat();
        assert_eq!(ports(&settings), wanted);
        settings.screen.web_port = Within(9000);
        assert!(ports(&settings).contains(&(8006, Protocol::Tcp)));
        settings.pod.monitor = Some(Monitor::read("tcp:127.0.0.1:22,server").unwrap());
        assert!(!ports(&settings).contains(&(22, Protocol::Tcp)));
    }

    #[test]
    fn a_port_in_use_is_skipped() {
        let taken = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let listeners = Listeners::open(&[(port, Protocol::Tcp), (port, Protocol::Udp)]);
        assert!(listeners.tcp.iter().all(|it| it.local_addr().unwrap().is_ipv6()));
        assert!(listeners.udp.iter().any(|it| it.local_addr().unwrap().is_ipv4()));
    }
}
