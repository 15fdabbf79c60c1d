//! Ports of the pod that are the guest's: they listen on all addresses of the pod, its loopback
//! among them, which is where `kubectl port-forward` comes from.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::settings::Settings;
use crate::settings::words::Protocol;

/// The guest's desktop.
const RDP: u16 = 3389;
/// Connections that wait to be accepted.
const WAITING: i32 = 128;

/// What listens.
#[derive(Debug, Default)]
pub struct Doors {
    /// For connections.
    pub tcp: Vec<TcpListener>,
    /// For datagrams.
    pub udp: Vec<UdpSocket>,
}

/// The ports that go to the guest: its desktop and those that the user names, but none that the pod
/// keeps.
#[must_use]
pub fn ports(settings: &Settings) -> Vec<(u16, Protocol)> {
    let rdp = [(RDP, Protocol::Tcp), (RDP, Protocol::Udp)];
    let mut ports = Vec::new();
    for port in rdp.into_iter().chain(settings.network.forwarded.0.iter().copied()) {
        if ports.contains(&port) {
            continue;
        }
        match keeper(settings, port) {
            None => ports.push(port),
            Some(keeper) => {
                tracing::warn!("network: port {} stays with the pod: {keeper}", port.0);
            }
        }
    }
    ports
}

/// Who keeps a port, if somebody does.
fn keeper(settings: &Settings, port: (u16, Protocol)) -> Option<&'static str> {
    let tcp = |number: u32| port == (u16::try_from(number).unwrap_or(0), Protocol::Tcp);
    if settings.network.kept.0.contains(&port) {
        Some("it is in HOST_PORTS")
    } else if settings.screen.web && tcp(settings.screen.web_port.0) {
        Some("it is WEB_PORT")
    } else if settings.vnc().is_some_and(|it| tcp(it.into())) {
        Some("it is VNC_PORT")
    } else {
        None
    }
}

impl Doors {
    /// Listens on these. What cannot be had is told, and the rest is there without it.
    #[must_use]
    pub fn open(ports: &[(u16, Protocol)]) -> Self {
        let mut doors = Self::default();
        for (number, protocol) in ports {
            let both: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
            for address in both {
                match (listen(SocketAddr::new(address, *number), *protocol), protocol) {
                    (Ok(socket), Protocol::Tcp) => doors.tcp.push(socket.into()),
                    (Ok(socket), Protocol::Udp) => doors.udp.push(socket.into()),
                    // A pod without IPv6.
                    (Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL), _) if address.is_ipv6() => {}
                    (Err(error), _) => tell(*number, *protocol, error),
                }
            }
        }
        doors
    }
}

fn tell(number: u16, protocol: Protocol, error: Errno) {
    let protocol = match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    let way_out = match error {
        Errno::ADDRINUSE => "something in the pod listens there; leave it to that with HOST_PORTS",
        Errno::ACCESS => {
            "ports below 1024 need --sysctl net.ipv4.ip_unprivileged_port_start=0, or as root the \
             capability NET_BIND_SERVICE: else take another number"
        }
        _ => "it does not reach the guest",
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
        // Connections of a pod that was here before do not count.
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    rustix::net::bind(&socket, &address)?;
    if protocol == Protocol::Tcp {
        rustix::net::listen(&socket, WAITING)?;
    }
    Ok(socket)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::value::{Value as _, Within};
    use crate::settings::words::Ports;

    #[test]
    fn the_desktop_and_what_the_user_names_are_the_guests_but_not_what_the_pod_keeps() {
        let mut settings = Settings::unsaid();
        settings.screen.vnc_port = Some(Within(5900));
        let rdp = vec![(3389, Protocol::Tcp), (3389, Protocol::Udp)];
        assert_eq!(ports(&settings), rdp);
        settings.network.forwarded = Ports::read("22,3389,8006,5900,7000/udp,8006/udp,9").unwrap();
        settings.network.kept = Ports::read("9,3389/udp").unwrap();
        let wanted = [(3389, Protocol::Tcp), (22, Protocol::Tcp)];
        let wanted = [&wanted[..], &[(7000, Protocol::Udp), (8006, Protocol::Udp)]].concat();
        assert_eq!(ports(&settings), wanted);
        settings.screen.web_port = Within(9000);
        assert!(ports(&settings).contains(&(8006, Protocol::Tcp)));
    }

    #[test]
    fn a_port_that_is_in_use_is_left_out() {
        let taken = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let doors = Doors::open(&[(port, Protocol::Tcp), (port, Protocol::Udp)]);
        assert!(doors.tcp.iter().all(|it| it.local_addr().unwrap().is_ipv6()));
        assert!(doors.udp.iter().any(|it| it.local_addr().unwrap().is_ipv4()));
    }
}
